"""The judge service: completed trajectories in, scored groups out.

A trajectory is acknowledged only once the log acknowledged the event that holds it: the group's `group.scored`, or a
`group.discarded`. Until then the broker holds it, so open groups are rebuilt by redelivery when a judge dies. That a
group is scored once is the broker's to keep (its subject may hold one event only); a judge that finds its group on the
log already takes that event for its own and calls late what is not in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from judge.commands.labelled import read_labelled
from judge.groups import Assembler, Closed, Group, GroupKey, key_of
from judge.monitor import Watch
from judge.rewards.compose import open_composer
from judge.scoring import Composer, judge_hash, late, score
from pipeline import crash
from pipeline.config import Config
from pipeline.events import GroupDiscarded, GroupScored, TrajectoryCompleted
from pipeline.log.broker import Broker, Consumption, Delivery
from pipeline.running.service import Ready
from pipeline.telemetry.logs import get_logger

log = get_logger("judge")

_BATCH = 512
_GATHER_S = 0.05
"""After the first trajectory of a batch, how long the batch may fill: latency against work per trajectory."""
_IDLE_S = 1.0
_LOOKUPS = 32
_WAITING_GROUPS = 1024
"""Closed groups in memory at once; beyond it the rest waits on the log."""


async def serve(config: Config, ready: Ready) -> None:
    """Runs until cancelled."""
    async with (
        Broker.connect(config.nats, name="judge") as broker,
        open_composer(config, broker) as composer,
        broker.consume("judge") as messages,
    ):
        judge = Judge(broker, config, composer, judge_hash(config.judge))
        anchors = read_labelled(Path(config.judge.anchors.file)) if config.judge.anchors.file else []
        async with anyio.create_task_group() as tg:
            if composer is not None:
                watch = Watch(
                    config.judge, config.path("judge.json"), composer.rulers, anchors, broker.publish,
                    project=config.project, judge=judge_hash(config.judge),
                )  # fmt: skip
                tg.start_soon(watch.run)
            ready()
            await judge.run(messages)


class Judge:
    """One consumer of completed trajectories. Groups are assembled in memory, so a project has one judge process;
    more judging at once is `judge.concurrency`."""

    def __init__(
        self,
        broker: Broker,
        config: Config,
        composer: Composer | None,
        judge_hash: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._broker, self._config, self._composer = broker, config.judge, composer
        self._hash, self._clock = judge_hash, clock
        self._assembler = Assembler(config.judge)
        self._backlog = 0
        self._newest = 0.0
        self._room = anyio.Event()

    async def run(self, messages: Consumption) -> None:
        """Consume for ever. A group's failure is a crash: what was not acknowledged comes again."""
        async with anyio.create_task_group() as tg:
            while True:
                await self._wait_for_room()
                for group in await self._take(await self._next_batch(messages)):
                    tg.start_soon(self._finish, group)

    # -- assembling ------------------------------------------------------------------------------------------------

    async def _next_batch(self, messages: Consumption) -> list[Delivery]:
        patience = min(max(self._assembler.next_deadline() - self._clock(), 0.01), _IDLE_S)
        batch = await messages.batch(1, patience)
        if batch and batch[-1].pending:
            batch += await messages.batch(min(batch[-1].pending, _BATCH), _GATHER_S)
        self._backlog = batch[-1].pending if batch else 0
        return batch

    async def _take(self, batch: list[Delivery]) -> list[Group]:
        """Put deliveries into their groups; the groups that are complete, or whose time is up."""
        arrived = [(d, d.event) for d in batch if isinstance(d.event, TrajectoryCompleted)]
        await self._look_up({key_of(e) for _, e in arrived if not self._assembler.knows(key_of(e))})
        closed: list[Group] = []
        for delivery, event in arrived:
            self._newest = max(self._newest, event.at / 1e6)
            match self._assembler.add(delivery, event, self._clock()):
                case Group() as group:
                    closed.append(group)
                case Closed(late=False):
                    await delivery.ack()
                case Closed(key=key):
                    await self._late(delivery, event, key)
                case None:
                    pass
        return closed + self._assembler.due(self._newest if self._backlog else self._clock())

    async def _look_up(self, keys: set[GroupKey]) -> None:
        """Find out which groups were scored or discarded in an earlier life."""
        limiter = anyio.CapacityLimiter(_LOOKUPS)

        async def one(key: GroupKey) -> None:
            async with limiter:
                if held := await self._held_on_log(key):
                    self._assembler.remember(key, held)

        async with anyio.create_task_group() as tg:
            for key in keys:
                tg.start_soon(one, key)

    async def _held_on_log(self, key: GroupKey) -> set[str]:
        """The trajectories in this group's events on the log."""
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

    async def _late(self, delivery: Delivery, event: TrajectoryCompleted, key: GroupKey) -> None:
        await self._broker.publish(late(event))
        await delivery.ack()
        self._assembler.remember(key, [event.trajectory])
        log.info("late", group=key.group, trajectory=event.trajectory)

    # -- finishing -------------------------------------------------------------------------------------------------

    async def _finish(self, group: Group) -> None:
        event = await score(group, self._config, self._hash, self._composer)
        crash.point("judge.before_publish")
        ack = await self._broker.publish(event)
        crash.point("judge.after_publish")
        trajectories = set(group.arrivals)
        held = trajectories
        if ack.duplicate and isinstance(event, GroupScored):
            held = await self._held_on_log(group.key)
        for missed in [a for t, a in group.arrivals.items() if t not in held]:
            await self._broker.publish(late(missed.event))
        for delivery in group.deliveries:
            await delivery.ack()
        self._assembler.finished(group, trajectories | held)
        self._room.set()
        if isinstance(event, GroupDiscarded):
            log.info("group discarded", group=event.group, reason=event.reason, detail=event.detail)

    async def _wait_for_room(self) -> None:
        while self._assembler.scoring >= _WAITING_GROUPS:
            self._room = anyio.Event()
            await self._room.wait()
