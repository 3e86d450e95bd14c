"""Measures whether the judge can still be trusted, among other things by judging groups with known rewards again and
again. The judge service runs it beside the scoring of groups.

A judge that drifts trains the policy towards its own error, and the rewards rise while it does. The anchors are
groups with known rewards; a Kendall tau below `judge.anchors.min_tau` is an alarm. All measurements are on the log
as `group.measured`, where SQL can compare them with what was trained meanwhile. A judge is an `Asker` here, which has
one rubric; its passes are counted in its `statistics`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import anyio

from judge.labelled import LabelledGroup, measure_agreement
from judge.ruler.asking import Asker, JudgingError
from pipeline.config import JudgeConfig
from pipeline.events import JudgeMeasured
from pipeline.telemetry.logs import get_logger

logger = get_logger("judge.monitor")

_CHECK_S = 5.0
"""How often it looks whether there are new passes."""
_PUBLISH_S = 60.0
"""Least time between two events about the groups of one judge."""

Publish = Callable[[JudgeMeasured], Awaitable[object]]


class JudgeMonitor:
    """Publishes the statistics of the judges, and judges groups with known rewards (anchors) at intervals."""

    def __init__(
        self,
        config: JudgeConfig,
        judges: Mapping[str, Asker],
        anchors: Sequence[LabelledGroup],
        publish: Publish,
        *,
        project: str = "",
        judge: str = "",
    ) -> None:
        """`judges` by the name of their reward; `judge` is the judge configuration's hash."""
        self._config, self._judges, self._anchors = config, judges, anchors
        self._publish, self._project, self._config_hash = publish, project, judge
        self._published: dict[str, tuple[int, int, float]] = {}
        """For each judge, the numbers of passes and failed passes in its last event, and that event's time."""

    async def run(self) -> None:
        """Publish statistics and judge the anchors until cancelled; publish what is left at the end."""
        async with anyio.create_task_group() as tg:
            if self._anchors and self._judges:
                tg.start_soon(self._judge_anchors)
            try:
                while True:
                    await self.publish(at_least_s_apart=_PUBLISH_S)
                    await anyio.sleep(_CHECK_S)
            finally:
                with anyio.move_on_after(2, shield=True):
                    await self.publish()

    async def publish(self, *, at_least_s_apart: float = 0.0) -> None:
        """Publish the statistics of each judge that made passes since its last event, unless that is less than
        `at_least_s_apart` seconds ago."""
        for name, judge in self._judges.items():
            statistics = judge.statistics
            passes, failed, at = self._published.get(name, (0, 0, -math.inf))
            if statistics.passes == passes or time.monotonic() - at < at_least_s_apart:
                continue
            self._published[name] = (statistics.passes, statistics.failed_judgings, time.monotonic())
            await self._publish(
                JudgeMeasured(
                    **self._identity(name, judge),
                    **statistics.measured_fields(),
                    kind="groups",
                    recent_passes=statistics.passes - passes,
                    recent_failed=statistics.failed_judgings - failed,
                    failure=statistics.failure,
                )
            )

    def _identity(self, name: str, judge: Asker) -> dict[str, Any]:
        """Return the fields of an event that say which judge it is about."""
        return {
            "project": self._project,
            "judge": self._config_hash,
            "model": self._config.model,
            "ruler": name,
            "rubric": judge.rubric.name,
            "rubric_hash": judge.rubric.hash,
        }

    async def _judge_anchors(self) -> None:
        """Judge the anchors with each judge every `judge.anchors.every_s`, until cancelled."""
        while True:
            for name, judge in self._judges.items():
                await self.check_anchors(name, judge)
            await anyio.sleep(self._config.anchors.every_s)

    async def check_anchors(self, name: str, judge: Asker) -> None:
        """Judge the anchors once, publish the agreement, and raise the alarm if it is too low or nothing could be
        judged."""
        pairs = []
        for group in self._anchors:
            try:
                scores, _ = await judge.judge(group.transcripts, count=False)
                pairs.append((group.rewards, scores))
            except JudgingError as error:
                logger.warning("anchor not judged", anchor=group.id, reason=str(error)[:300])
        failed = len(self._anchors) - len(pairs)
        agreement = measure_agreement(pairs)
        alarm = agreement.kendall_tau is None or agreement.kendall_tau < self._config.anchors.min_tau
        measured = {**asdict(agreement), "failed": failed, "alarm": alarm}
        await self._publish(JudgeMeasured(**self._identity(name, judge), **measured, kind="anchors"))
        write = logger.error if alarm else logger.info
        message = "judge disagrees with the anchors" if alarm else "judge agrees with the anchors"
        message = message if pairs else "no anchor could be judged"
        write(message, ruler=name, kendall_tau=agreement.kendall_tau, failed=failed)
