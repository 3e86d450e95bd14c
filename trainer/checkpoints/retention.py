"""What goes of trained versions, and what stays: the trainer owns the adapters and checkpoint events of its branch.

A version that need not stay is retired first (`policy.retired`): gateways offer it no more. After `retention.grace_s`, if
nothing came to need it meanwhile, its adapter is removed from the object store. Its checkpoint event stays for
`retention.policy_days`, as long as a group that it names can come again.

What stays: the newest versions, the best by validation, what the model's name stands for or a split names with the
predecessor of each, what an open trajectory is pinned to, and what an inference server holds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import anyio

from pipeline import streams
from pipeline.config import Config
from pipeline.events import (
    CheckpointPublished,
    PolicyLoaded,
    PolicyPromoted,
    PolicyRetired,
    PolicyUnloaded,
    TrajectoryCompleted,
    TrajectoryOpened,
)
from pipeline.log import objects
from pipeline.log.broker import Broker, BrokerError, Recorded
from pipeline.telemetry.logs import get_logger
from trainer.learner import Learner

log = get_logger("trainer.checkpoints.retention")

_Version = CheckpointPublished | PolicyLoaded | PolicyUnloaded | PolicyRetired | PolicyPromoted

_SWEEP_EVERY_S = 3600.0
_ORPHAN_AGE_S = 3600.0
"""An upload takes less."""


def kept(versions: Iterable[str], newest: int, needed: Iterable[str], decided: Iterable[str]) -> set[str]:
    """Which of `versions` (oldest first) stay: the `newest` newest, what is `needed`, and what was `decided` on with the
    version before each."""
    order = list(versions)
    stay = {*order[-max(newest, 1) :], *needed}
    for version in decided:
        stay.add(version)
        if version in order[1:]:
            stay.add(order[order.index(version) - 1])
    return stay & set(order)


class Holdings:
    """Which versions the inference servers hold, by what their gateways said of loading and unloading."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, set[str]]] = {}
        """By replica: which life of it, and its versions."""

    def note(self, event: PolicyLoaded | PolicyUnloaded) -> None:
        life, versions = self._held.get(event.replica, ("", set()))
        if isinstance(event, PolicyLoaded):
            if life != event.incarnation:
                versions = set()  # a server that started anew holds nothing
            self._held[event.replica] = event.incarnation, versions | {event.version}
        elif life == event.incarnation:
            versions.discard(event.version)

    def versions(self) -> set[str]:
        return {v for _, versions in self._held.values() for v in versions}


class Retention:
    """See the module. One per trainer process."""

    def __init__(self, config: Config, broker: Broker, learners: Mapping[str, Learner]) -> None:
        self._config, self._broker, self._learners = config, broker, learners
        self._settings = config.retention
        self._project = config.project
        self._gone: set[str] = set()
        """Objects that are known not to be there."""
        self._reconnects = -1
        self._reset()

    def _reset(self) -> None:
        """What was read of the log counts no more: its machine may have lost its end with its power."""
        self._holdings: dict[str, Holdings] = {name: Holdings() for name in self._learners}
        self._pinned: dict[str, tuple[str, str]] = {}
        """By open trajectory: its model and the version that it is pinned to."""
        self._next_policy = self._next_rollout = 1
        """Next sequence to read of each stream."""

    async def run(self) -> None:
        """For as long as the trainer runs. What the log does not answer is looked at again in the next round."""
        swept = 0.0
        while self._settings.adapters:
            try:
                await self.look()
                if time.monotonic() - swept > _SWEEP_EVERY_S:
                    await self._sweep()
                    swept = time.monotonic()
            except BrokerError as error:
                log.warning("retention waits for the log", error=str(error))
            await anyio.sleep(self._settings.every_s)

    async def look(self) -> None:
        """One round over every model."""
        reconnects = self._broker.client.stats["reconnects"]
        if reconnects != self._reconnects:
            self._reset()
            self._reconnects = reconnects
        for name, learner in self._learners.items():
            await self._model(name, learner)

    # -- one model -----------------------------------------------------------------------------------------------

    async def _model(self, name: str, learner: Learner) -> None:
        branch, now = self._config.trainer.branch, time.time()
        mine = await self._checkpoints(model=name, branch=branch)
        mine.sort(key=lambda e: e.step)
        stay = await self.needed(name, learner, mine)
        retired = await self._retired(name)
        for event in mine:
            if event.version in stay:
                if event.version in retired:
                    await self._say(event, withdrawn=True)
                continue
            if event.adapter in self._gone:
                continue
            if event.version not in retired:
                if await self._there(event.adapter):
                    await self._say(event)
            elif retired[event.version] / 1e6 + self._settings.grace_s <= now:
                await self._remove(event)

    async def needed(self, name: str, learner: Learner, mine: list[CheckpointPublished]) -> set[str]:
        """The versions of a model's line that stay; `mine` are its checkpoints, oldest first."""
        settings = learner.settings
        best = learner.checkpoints.best()
        by_step = {e.step: e.version for e in mine}
        needed = {by_step[best.step]} if best is not None and best.step in by_step else set()
        decided: set[str] = set()
        if self._config.trainer.branch == "main":  # only these are served under their names
            await self._read_on()
            last = await self._broker.read_last(PolicyPromoted, project=self._project, model=name)
            if last is not None:
                decided = {last.event.version, last.event.other} - {""}
            needed |= self._holdings[name].versions()
            needed |= await self._pins(name)
        newest = max(self._settings.adapters, settings.max_staleness + 2)
        return kept([e.version for e in mine], newest, needed, decided)

    async def _checkpoints(self, **keys: Any) -> list[CheckpointPublished]:
        history = await self._broker.read(CheckpointPublished, project=self._project, **keys)
        return [r.event for r in history]

    async def _retired(self, name: str) -> dict[str, int]:
        """When each version of this branch was retired, stream time in microseconds."""
        out: dict[str, int] = {}
        for recorded in await self._broker.read(PolicyRetired, project=self._project, model=name):
            event = recorded.event
            if event.branch != self._config.trainer.branch:
                continue
            if event.withdrawn:
                out.pop(event.version, None)
            else:
                out.setdefault(event.version, recorded.place.at)
        return out

    async def _say(self, event: CheckpointPublished, *, withdrawn: bool = False) -> None:
        said = PolicyRetired(
            project=event.project, model=event.model, version=event.version, branch=event.branch, withdrawn=withdrawn
        )  # fmt: skip
        await self._broker.publish(said)
        log.info("retired", version=event.version, withdrawn=withdrawn)

    async def _there(self, adapter: str) -> bool:
        if await objects.exists(self._broker, streams.ADAPTERS_BUCKET, adapter):
            return True
        self._gone.add(adapter)
        return False

    async def _remove(self, event: CheckpointPublished) -> None:
        # Another branch may have trained the very same adapter under the same name: the object is one.
        every = await self._checkpoints(model=event.model)
        if any(e.adapter == event.adapter and e.branch != event.branch for e in every):
            self._gone.add(event.adapter)
            return
        await objects.remove(self._broker, streams.ADAPTERS_BUCKET, event.adapter)
        self._gone.add(event.adapter)
        log.info("adapter removed", version=event.version, adapter=event.adapter)

    # -- who needs a version -------------------------------------------------------------------------------------

    async def _read_on(self) -> None:
        """Take in what the log says since the last look: loads, unloads, and trajectories that are pinned."""
        loads: Sequence[Recorded[PolicyLoaded | PolicyUnloaded]] = await self._broker.read_all(
            (PolicyLoaded, PolicyUnloaded), start_seq=self._next_policy, project=self._project
        )
        for load in loads:
            if load.event.model in self._holdings:
                self._holdings[load.event.model].note(load.event)
            self._next_policy = load.seq + 1
        more = True
        while more:
            page = await self._broker.read_page(TrajectoryOpened, self._next_rollout, project=self._project)
            for opened in page.events:
                if opened.event.pinned:
                    self._pinned[opened.event.trajectory] = opened.event.model, opened.event.pinned
            self._next_rollout, more = page.last + 1, page.more

    async def _pins(self, name: str) -> set[str]:
        """Versions that open trajectories of a model are pinned to."""
        out: set[str] = set()
        for trajectory, (model, version) in list(self._pinned.items()):
            if model != name:
                continue
            keys: dict[str, Any] = {"project": self._project, "trajectory": trajectory}
            if await self._broker.read_last(TrajectoryCompleted, **keys, model=model) is not None:
                del self._pinned[trajectory]
            elif await self._broker.read_last(TrajectoryOpened, **keys) is None:
                del self._pinned[trajectory]  # older than the stream's retention
            else:
                out.add(version)
        return out

    # -- tidying -------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        before = int((time.time() - _ORPHAN_AGE_S) * 1e6)
        swept = await objects.sweep(self._broker, streams.ADAPTERS_BUCKET, before)
        if swept:
            log.info("removed what interrupted uploads left", objects=swept)
        if self._config.trainer.branch == "main" and self._settings.policy_days:
            await self.trim(int((time.time() - self._settings.policy_days * streams.DAY_S) * 1e6))

    async def trim(self, before_us: int) -> int:
        """Delete events of POLICY from before `before_us` (stream time, microseconds) that nothing needs; returns how many."""
        deleted = 0
        for name in self._learners:
            events: Sequence[Recorded[_Version]] = await self._broker.read_all(
                (CheckpointPublished, PolicyLoaded, PolicyUnloaded, PolicyRetired, PolicyPromoted),
                project=self._project,
                model=name,
            )
            last = max((r.seq for r in events if isinstance(r.event, PolicyPromoted)), default=0)
            checkpoints = [r.event for r in events if isinstance(r.event, CheckpointPublished)]
            there = {e.version for e in checkpoints if await self._needs(e)}
            for recorded in events:
                event = recorded.event
                if recorded.place.at >= before_us or recorded.seq == last:
                    continue
                if event.version in there and not isinstance(event, PolicyPromoted):
                    continue  # its checkpoint, and who loaded it
                await self._broker.delete(recorded.stream, recorded.seq)
                deleted += 1
        if deleted:
            log.info("trimmed", events=deleted)
        return deleted

    async def _needs(self, event: CheckpointPublished) -> bool:
        return event.adapter not in self._gone and await self._there(event.adapter)
