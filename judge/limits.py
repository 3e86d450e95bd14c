"""Whether learning is over budget, as the store's alarms on the log say (`[budget]`, docs/judging.md).

The store adds up what was spent and raises an alarm at a limit; the judge asks here before it scores a group or
compares a shadow call, and so stops what costs money and feeds the trainer."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.events import AlarmChanged
from pipeline.log.broker import Broker
from pipeline.names import split_point

_ALARMS = {"judge_usd": "over_judge_budget", "gpu_hours": "over_gpu_budget", "sampled_tokens": "over_token_budget"}
"""The alarm of each limit, by its setting."""


class Budget:
    """The limits of the settings, and whether they are reached."""

    def __init__(self, broker: Broker, config: Config) -> None:
        self._broker, self._project, self._keep_share = broker, config.project, config.budget.keep_share
        self._alarms = [alarm for setting, alarm in _ALARMS.items() if getattr(config.budget, setting)]

    async def refusal(self, group: str) -> str:
        """Return why a group, or a shadow call of this name, is not to be scored: the text of the alarm that a limit of
        `[budget]` is reached. Empty if none is, or if the name is in the share that is scored all the same
        (`budget.keep_share`). The newest change of each alarm is read from the log's leader. Raises `BrokerError`."""
        for alarm in self._alarms:
            newest = await self._broker.read_last(AlarmChanged, project=self._project, alarm=alarm)
            if newest is not None and newest.event.state == "raised":
                return "" if split_point(group) < 100 * self._keep_share else newest.event.detail
        return ""
