"""The judge service: consumes completed trajectories, publishes scored groups.

A trajectory is acknowledged only after the log has acknowledged the event that holds it: the group's `group.scored`,
or a `group.discarded`. Until then the broker keeps it, so that a new judge rebuilds the open groups from
redeliveries. Each group has its own subject, limited to one message, so the broker rejects a second score. If a
group's event is already on the log, the judge adopts it and records its own trajectories that are missing from that
event as late.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from judge.groups import AfterClosing, Group, GroupAssembler, GroupKey, key_of
from judge.labelled import read_labelled
from judge.monitor import JudgeMonitor
from judge.rewards.compose import open_composer, open_composer_on_log
from judge.ruler.transcripts import Transcript
from judge.scoring import RewardComposer, judge_hash, late_event, score_closed
from pipeline import crash
from pipeline.config import Config
from pipeline.events import GroupDiscarded, GroupScored, TrajectoryCompleted
from pipeline.gather import gather
from pipeline.log.broker import Broker, Consumption, Delivery
from pipeline.running.service import Ready
from pipeline.telemetry.logs import get_logger

log = get_logger("judge")

_BATCH = 512
_FILL_S = 0.05
"""How long a batch may fill after its first trajectory. Longer means less work per trajectory and more latency."""
_MIN_WAIT_S, _MAX_WAIT_S = 0.01, 1.0
_LOOKUPS = 32
_MAX_SCORING = 1024
"""Closed groups in memory at once. The other trajectories stay on the log until fewer groups are being scored."""


def check(config: Config) -> None:
    """Raise `ConfigError` for settings with which `serve` would not start. Reward functions are imported."""

    async def load(member: TrajectoryCompleted) -> Transcript:
        raise NotImplementedError  # no member is scored

    async def compose() -> None:
        async with open_composer(config, load):
            pass

    if config.judge.anchors.file:
        read_labelled(Path(config.judge.anchors.file))
    anyio.run(compose)


async def serve(config: Config, ready: Ready) -> None:
    """Run the service until it is cancelled."""
    judge_id = judge_hash(config.judge)
    async with (
        Broker.connect(config.nats, name="judge") as broker,
        open_composer_on_log(config, broker) as composer,
        broker.consume("judge") as messages,
    ):
        anchors = read_labelled(Path(config.judge.anchors.file)) if config.judge.anchors.file else []
        async with anyio.create_task_group() as tg:
            if composer is not None:
                monitor = JudgeMonitor(
                    config.judge, config.path("judge.json"), composer.rulers, anchors, broker.publish,
                    project=config.project, judge=judge_id,
                )  # fmt: skip
                tg.start_soon(monitor.run)
            ready()
            await Judge(broker, config, composer, judge_id).run(messages)


class Judge:
    """A consumer of completed trajectories. Groups are assembled in memory, so a project has one judge process."""

    def __init__(
        self,
        broker: Broker,
        config: Config,
        composer: RewardComposer | None,
        judge_id: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`judge_id` is the judge configuration's hash; `clock` returns Unix seconds."""
        self._broker, self._config, self._composer = broker, config.judge, composer
        self._judge_id, self._clock = judge_id, clock
        self._assembler = GroupAssembler(config.judge)
        self._backlog = 0
        self._newest = 0.0
        self._scoring_slot_freed = anyio.Event()

    async def run(self, messages: Consumption) -> None:
        """Consume until cancelled. An exception while scoring ends the process; unacknowledged trajectories are
        redelivered."""
        async with anyio.create_task_group() as tg:
            while True:
                while self._assembler.scoring >= _MAX_SCORING:
                    self._scoring_slot_freed = anyio.Event()
                    await self._scoring_slot_freed.wait()
                for group in await self._assemble(await self._next_batch(messages)):
                    tg.start_soon(self._score_and_publish, group)

    async def _next_batch(self, messages: Consumption) -> list[Delivery]:
        wait_s = min(max(self._assembler.next_deadline() - self._clock(), _MIN_WAIT_S), _MAX_WAIT_S)
        batch = await messages.batch(1, wait_s)
        if batch and batch[-1].pending:
            batch += await messages.batch(min(batch[-1].pending, _BATCH), _FILL_S)
        self._backlog = batch[-1].pending if batch else 0
        return batch

    async def _assemble(self, batch: list[Delivery]) -> list[Group]:
        """Add deliveries to their groups. Return the groups that became complete or reached their deadline."""
        arrived = [(d, d.event) for d in batch if isinstance(d.event, TrajectoryCompleted)]
        unknown = list({key for _, e in arrived if not self._assembler.knows(key := key_of(e))})
        # An earlier process may have scored or discarded them.
        for key, held in zip(unknown, await gather(self._held_on_log, unknown, _LOOKUPS), strict=True):
            if held:
                self._assembler.mark_closed(key, held)
        closed: list[Group] = []
        for delivery, event in arrived:
            self._newest = max(self._newest, event.at / 1e6)
            match self._assembler.add(delivery, event, self._clock()):
                case Group() as group:
                    closed.append(group)
                case AfterClosing(late=False):
                    await delivery.ack()
                case AfterClosing(late=True):
                    await self._broker.publish(late_event(event))
                    await delivery.ack()
                    self._assembler.mark_closed(key_of(event), [event.trajectory])
                    log.info("late", group=key_of(event).group, trajectory=event.trajectory)
        # While there is a backlog, deadlines are measured against event time.
        return closed + self._assembler.close_due(self._newest if self._backlog else self._clock())

    async def _held_on_log(self, key: GroupKey) -> set[str]:
        """Return the trajectories in this group's events on the log."""
        names: dict[str, Any] = {"project": key.project, "model": key.model, "group": key.group}
        held: set[str] = set()
        for scored in await self._broker.read(GroupScored, **names):
            if (scored.event.branch, scored.event.split) == ("main", key.split):
                held |= {m.trajectory for m in scored.event.members}
        for discarded in await self._broker.read(GroupDiscarded, **names):
            event = discarded.event
            if (event.branch, event.by, event.split) == ("main", "judge", key.split):
                held |= set(event.trajectories)
        return held

    async def _score_and_publish(self, group: Group) -> None:
        """Score a closed group, publish its event, then acknowledge its trajectories.

        If another judge process published this group first, its event counts; trajectories of ours that it lacks are
        recorded as late."""
        event = await score_closed(group, self._config, self._judge_id, self._composer)
        crash.point("judge.before_publish")
        ack = await self._broker.publish(event)
        crash.point("judge.after_publish")
        ours = set(group.arrivals)
        on_log = ours  # our event is the one on the log, unless another judge process was first
        if ack.duplicate and isinstance(event, GroupScored):
            on_log = await self._held_on_log(group.key)
        for arrival in [arrival for name, arrival in group.arrivals.items() if name not in on_log]:
            await self._broker.publish(late_event(arrival.event))
        for delivery in group.deliveries:
            await delivery.ack()
        self._assembler.finish(group, ours | on_log)
        self._scoring_slot_freed.set()
        if isinstance(event, GroupDiscarded):
            log.info("group discarded", group=event.group, reason=event.reason, detail=event.detail)
