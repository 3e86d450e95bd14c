"""Removes the adapters and events of policy versions that nothing needs. The trainer owns those of its branch.

A version that is not needed is retired first (`policy.retired`), and gateways no longer offer it. After
`retention.grace_s`, if it is still not needed, its adapter is removed from the object store. Its checkpoint event
stays for `retention.policy_days`, since groups that it learned from can be delivered again until then.

These versions are needed: the newest, the best by validation, those that the model's name or a traffic split
points to and the version before each of them, those that an open trajectory is pinned to, and those that an
inference server has loaded.
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
    group_key,
)
from pipeline.log import objects
from pipeline.log.broker import Broker, BrokerError, Recorded
from pipeline.telemetry.logs import get_logger
from trainer.learner import Learner

log = get_logger("trainer.checkpoints.retention")

_Version = CheckpointPublished | PolicyLoaded | PolicyUnloaded | PolicyRetired | PolicyPromoted

_SWEEP_EVERY_S = 3600.0
_ORPHAN_AGE_S = 3600.0
"""Parts of uploads that are older than this belong to no upload in progress."""


def versions_to_keep(
    versions: Iterable[str], newest: int, needed: Iterable[str], promoted: Iterable[str]
) -> set[str]:
    """The subset of `versions` (oldest first) that is kept: the `newest` newest, the `needed` ones, and the
    `promoted` ones with the version before each."""
    order = list(versions)
    stay = {*order[-max(newest, 1) :], *needed}
    for version in promoted:
        stay.add(version)
        if version in order[1:]:
            stay.add(order[order.index(version) - 1])
    return stay & set(order)


class Holdings:
    """The versions that each inference server has loaded, by the events of its gateways."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, set[str]]] = {}
        """For each replica, its incarnation and its loaded versions."""

    def note(self, event: PolicyLoaded | PolicyUnloaded) -> None:
        """Take in an event, in the order of the log."""
        incarnation, versions = self._held.get(event.replica, ("", set()))
        if isinstance(event, PolicyLoaded):
            if incarnation != event.incarnation:
                versions = set()  # a restarted server has nothing loaded
            self._held[event.replica] = event.incarnation, versions | {event.version}
        elif incarnation == event.incarnation:
            versions.discard(event.version)

    def versions(self) -> set[str]:
        """The versions that at least one server has loaded."""
        return {v for _, versions in self._held.values() for v in versions}


class Retention:
    """Removes what nothing needs for all models of a trainer process. `broker` must outlive it."""

    def __init__(self, config: Config, broker: Broker, learners: Mapping[str, Learner]) -> None:
        self._config, self._broker, self._learners = config, broker, learners
        self._settings = config.retention
        self._project = config.project
        self._gone: set[str] = set()
        """Adapters that are known to be removed from the object store."""
        self._reconnects = -1
        self._reset()

    def _reset(self) -> None:
        """Forget what was read from the log: a power cut may have taken its end."""
        self._holdings: dict[str, Holdings] = {name: Holdings() for name in self._learners}
        self._pinned: dict[str, TrajectoryOpened] = {}
        """The openings of the trajectories that were pinned to a version and may be open."""
        self._next_policy = self._next_rollout = 1
        """Next sequence to read of each stream."""

    async def run(self) -> None:
        """Do a round every `retention.every_s` seconds until cancelled. A round that the log does not answer is
        repeated later."""
        swept = 0.0
        while self._settings.adapters:
            try:
                await self.run_once()
                if time.monotonic() - swept > _SWEEP_EVERY_S:
                    await self._sweep()
                    swept = time.monotonic()
            except BrokerError as error:
                log.warning("retention round failed; it is repeated", error=str(error))
            await anyio.sleep(self._settings.every_s)

    async def run_once(self) -> None:
        """Retire and remove the versions of every model that nothing needs."""
        reconnects = self._broker.client.stats["reconnects"]
        if reconnects != self._reconnects:
            self._reset()
            self._reconnects = reconnects
        for name, learner in self._learners.items():
            await self._retire_and_remove(name, learner)

    # -- one model -----------------------------------------------------------------------------------------------

    async def _retire_and_remove(self, name: str, learner: Learner) -> None:
        branch, now = self._config.trainer.branch, time.time()
        checkpoints = await self._checkpoints(model=name, branch=branch)
        checkpoints.sort(key=lambda e: e.step)
        needed = await self.needed(name, learner, checkpoints)
        retired = await self._retired(name)
        for event in checkpoints:
            if event.version in needed:
                if event.version in retired:
                    await self._publish_retired(event, withdrawn=True)
            elif event.version not in retired:
                if await self._adapter_exists(event):
                    await self._publish_retired(event)
            elif (
                event.adapter not in self._gone
                and retired[event.version] / 1e6 + self._settings.grace_s <= now
            ):
                await self._remove(event)

    async def needed(self, name: str, learner: Learner, checkpoints: list[CheckpointPublished]) -> set[str]:
        """The versions of a model that are needed. `checkpoints` are all of its branch, oldest first."""
        settings = learner.settings
        best = learner.checkpoints.best()
        by_step = {e.step: e.version for e in checkpoints}
        needed = {by_step[best.step]} if best is not None and best.step in by_step else set()
        promoted: set[str] = set()
        if self._config.trainer.branch == "main":  # other branches are not served
            await self._read_news()
            last = await self._broker.read_last(PolicyPromoted, project=self._project, model=name)
            if last is not None:
                promoted = {last.event.version, last.event.other} - {""}
            needed |= self._holdings[name].versions()
            needed |= await self._pins(name)
        newest = max(self._settings.adapters, settings.max_staleness + 2)
        return versions_to_keep([e.version for e in checkpoints], newest, needed, promoted)

    async def _checkpoints(self, **keys: Any) -> list[CheckpointPublished]:
        history = await self._broker.read(CheckpointPublished, project=self._project, **keys)
        return [r.event for r in history]

    async def _retired(self, name: str) -> dict[str, int]:
        """For each retired version of this branch, the stream time of its retirement in microseconds."""
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

    async def _publish_retired(self, event: CheckpointPublished, *, withdrawn: bool = False) -> None:
        await self._broker.publish(
            PolicyRetired(
                project=event.project, model=event.model, version=event.version, branch=event.branch,
                withdrawn=withdrawn,
            )
        )  # fmt: skip
        log.info("version retired", version=event.version, withdrawn=withdrawn)

    async def _adapter_exists(self, event: CheckpointPublished) -> bool:
        if event.adapter in self._gone:
            return False
        if await objects.exists(self._broker, streams.ADAPTERS_BUCKET, event.adapter):
            return True
        self._gone.add(event.adapter)
        return False

    async def _remove(self, event: CheckpointPublished) -> None:
        # Branches that trained an equal adapter share one object.
        of_all_branches = await self._checkpoints(model=event.model)
        if not any(e.adapter == event.adapter and e.branch != event.branch for e in of_all_branches):
            await objects.remove(self._broker, streams.ADAPTERS_BUCKET, event.adapter)
            log.info("adapter removed", version=event.version, adapter=event.adapter)
        self._gone.add(event.adapter)

    # -- who needs a version -------------------------------------------------------------------------------------

    async def _read_news(self) -> None:
        """Read the loads, unloads and pinned trajectories that came since the last round."""
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
                    self._pinned[opened.event.trajectory] = opened.event
            self._next_rollout, more = page.last + 1, page.more

    async def _pins(self, name: str) -> set[str]:
        """The versions that open trajectories of a model are pinned to."""
        out: set[str] = set()
        for trajectory, opened in list(self._pinned.items()):
            if opened.model != name:
                continue
            keys: dict[str, Any] = {"project": self._project, "trajectory": trajectory}
            group = group_key(opened.group, trajectory)
            completed = await self._broker.read_last(
                TrajectoryCompleted, **keys, model=opened.model, group_key=group
            )
            if completed is not None:
                del self._pinned[trajectory]
            elif await self._broker.read_last(TrajectoryOpened, **keys) is None:
                del self._pinned[trajectory]  # removed by the stream's retention
            else:
                out.add(opened.pinned)
        return out

    # -- tidying -------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        before = int((time.time() - _ORPHAN_AGE_S) * 1e6)
        swept = await objects.sweep(self._broker, streams.ADAPTERS_BUCKET, before)
        if swept:
            log.info("incomplete uploads removed", objects=swept)
        if self._config.trainer.branch == "main" and self._settings.policy_days:
            await self.delete_old_events(
                int((time.time() - self._settings.policy_days * streams.DAY_S) * 1e6)
            )

    async def delete_old_events(self, before_us: int) -> int:
        """Delete the events of POLICY that are older than `before_us` (stream time in microseconds) and belong to
        removed versions. Returns how many."""
        deleted = 0
        for name in self._learners:
            events: Sequence[Recorded[_Version]] = await self._broker.read_all(
                (CheckpointPublished, PolicyLoaded, PolicyUnloaded, PolicyRetired, PolicyPromoted),
                project=self._project,
                model=name,
            )
            last = max((r.seq for r in events if isinstance(r.event, PolicyPromoted)), default=0)
            checkpoints = [r.event for r in events if isinstance(r.event, CheckpointPublished)]
            kept = {e.version for e in checkpoints if await self._adapter_exists(e)}
            for recorded in events:
                event = recorded.event
                if recorded.place.at >= before_us or recorded.seq == last:
                    continue
                if event.version in kept and not isinstance(event, PolicyPromoted):
                    continue  # the checkpoint of a version that still exists, or a load of it
                await self._broker.delete(recorded.stream, recorded.seq)
                deleted += 1
        if deleted:
            log.info("old policy events deleted", events=deleted)
        return deleted
