"""Removes the adapters and events of policy versions that nothing needs. The trainer owns those of its branch.

A version that is not needed is retired first (`policy.retired`), and gateways no longer offer it. After
`retention.grace_s`, if it is still not needed, its adapter is removed from the object store. Training states are
removed earlier: only the newest ones stay. The version's checkpoint event stays for `retention.policy_days`, since
groups that it learned from can be delivered again until then.

These versions are needed: the newest (`retention.adapters`, and at least those that training still uses), the best by
validation, that of `models.0.start` and those that an evaluation names, which later ones are compared with, those that
the model's name or a traffic split points to and those of the decision before, those that an open trajectory is pinned
to, and those that an inference server has loaded.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from pipeline import streams
from pipeline.config import Config
from pipeline.events import (
    CheckpointPublished,
    PolicyEvaluated,
    PolicyLoaded,
    PolicyPromoted,
    PolicyRetired,
    PolicyUnloaded,
    TrajectoryCompleted,
    TrajectoryOpened,
    group_key,
    standing_decisions,
)
from pipeline.log import objects
from pipeline.log.broker import Broker, BrokerError, LogEntry
from pipeline.telemetry.logs import get_logger
from pipeline.versions.loaded import LoadedVersions
from trainer.learner import Learner
from trainer.staleness import versions_kept

logger = get_logger("trainer.retention")

_PolicyEvent = CheckpointPublished | PolicyLoaded | PolicyUnloaded | PolicyRetired | PolicyEvaluated

_SWEEP_EVERY_S = 3600.0
"""Seconds between two removals of incomplete uploads and old events."""
_ORPHAN_AGE_S = 3600.0
"""Parts of uploads that are older than this belong to no upload in progress."""
_STATES = 2
"""Training states that stay in the object store: the newest, and the one before it for a start at a shorter log."""


@dataclass(eq=False)
class Version:
    """A version of the log whose adapter may still be in the object store. The fields before `at` are those of its
    `policy.checkpoint`."""

    step: int
    version: str
    adapter: str
    """Name of the adapter's object."""
    branch: str
    state: str
    """Name of the training state's object; empty if there is none."""
    at: int
    """Stream time of its event in microseconds."""
    retired_at: int | None = None
    """Stream time of its retirement; `None` if it is offered."""


class ModelHistory:
    """What POLICY says about the versions of one model; those whose adapter was removed are left out."""

    def __init__(self) -> None:
        self.versions: dict[tuple[str, str], Version] = {}
        """By branch and version."""
        self.loaded = LoadedVersions()
        self.evaluated: set[str] = set()
        """Names of the versions that an evaluation compared."""

    def apply(self, recorded: LogEntry[_PolicyEvent]) -> None:
        """Take in an event, in the order of the log."""
        match recorded.event:
            case CheckpointPublished() as event:
                version = Version(
                    event.step, event.version, event.adapter, event.branch, event.state, recorded.place.at
                )
                self.versions[event.branch, event.version] = version
            case PolicyRetired() as event if retired := self.versions.get((event.branch, event.version)):
                retired.retired_at = None if event.withdrawn else retired.retired_at or recorded.place.at
            case PolicyLoaded() | PolicyUnloaded() as event:
                self.loaded.apply(event)
            case PolicyEvaluated() as event:
                self.evaluated.add(event.version)

    def of_branch(self, branch: str) -> list[Version]:
        """The versions of a branch, oldest first."""
        return sorted((v for v in self.versions.values() if v.branch == branch), key=lambda v: v.step)

    def states_to_keep(self, since_us: int) -> set[str]:
        """Return the object names of the training states that stay: those of the newest versions of each branch, and of
        versions that were published after `since_us` (stream time). A branch begins with the state of the version that
        it was forked from, so branches share objects."""
        newest = [v for b in {v.branch for v in self.versions.values()} for v in self.of_branch(b)[-_STATES:]]
        return {v.state for v in [*newest, *(v for v in self.versions.values() if v.at > since_us)]}

    def forget(self, version: Version) -> None:
        """Leave out a version whose adapter is no longer in the object store."""
        del self.versions[version.branch, version.version]


class Retention:
    """Removes what nothing needs for all models of a trainer process. `broker` must outlive it."""

    def __init__(self, config: Config, broker: Broker, learners: Mapping[str, Learner]) -> None:
        self._config, self._broker, self._learners = config, broker, learners
        self._settings, self._project, self._branch = config.retention, config.project, config.trainer.branch
        self._reconnects = -1
        self._reset()

    def _reset(self) -> None:
        """Forget what was read from the log: a power cut may have taken the log's end."""
        self._models = {name: ModelHistory() for name in self._learners}
        self._pinned: dict[str, TrajectoryOpened] = {}
        """The openings of the trajectories that were pinned to a version and may be open."""
        self._removed_states: set[str] = set()
        self._next_policy = self._next_rollout = 1
        """Next sequence to read of each stream."""

    async def run(self) -> None:
        """Do a round every `retention.every_s` seconds until cancelled. A round that the log does not answer is
        repeated later."""
        swept = 0.0
        while True:
            try:
                await self.run_once()
                if time.monotonic() - swept > _SWEEP_EVERY_S:
                    await self._sweep()
                    swept = time.monotonic()
            except BrokerError as error:
                logger.warning("retention round failed; it is repeated", error=str(error))
            await anyio.sleep(self._settings.every_s)

    async def run_once(self) -> None:
        """One round: retire and remove the versions of every model that nothing needs, and old training states."""
        # After a reconnect the log may lack its end: what was read of it is read again.
        reconnects = self._broker.client.stats["reconnects"]
        if reconnects != self._reconnects:
            self._reset()
            self._reconnects = reconnects
        await self._read_new_events()
        for name, learner in self._learners.items():
            if self._settings.adapters:  # 0: all adapters stay
                await self._retire_and_remove(name, learner)
            await self._remove_states(self._models[name])

    # -- one model -----------------------------------------------------------------------------------------------

    async def _retire_and_remove(self, name: str, learner: Learner) -> None:
        """Retire the versions of a model that are not needed, withdraw the retirement of those that are needed again,
        and remove those that were retired `retention.grace_s` ago."""
        history = self._models[name]
        versions = history.of_branch(self._branch)
        needed = await self._needed(name, learner, versions)
        for version in versions:
            if version.version in needed:
                if version.retired_at is not None:
                    await self._publish_retired(name, version, withdrawn=True)
            elif version.retired_at is None:
                if await objects.exists(self._broker, streams.ADAPTERS_BUCKET, version.adapter):
                    await self._publish_retired(name, version)
                else:  # removed before, by this trainer or by that of another branch
                    history.forget(version)
            elif self._grace_over(version):
                await self._remove(history, version)

    async def _remove_states(self, history: ModelHistory) -> None:
        """Remove the branch's training states but those that `ModelHistory.states_to_keep` names. States younger than
        `retention.grace_s` stay, because the store may not have copied them to the lake yet."""
        kept = history.states_to_keep(int((time.time() - self._settings.grace_s) * 1e6))
        own = {v.state for v in history.of_branch(self._branch)}
        for state in own - kept - self._removed_states - {""}:
            await objects.remove(self._broker, streams.ADAPTERS_BUCKET, state)
            self._removed_states.add(state)

    async def _needed(self, name: str, learner: Learner, versions: Sequence[Version]) -> set[str]:
        """The names of the versions of a model that are needed, as the module's docstring says. `versions` are those of
        its branch, oldest first."""
        newest = max(self._settings.adapters, versions_kept(learner.settings))
        best = learner.validation.best
        needed = {v.version for v in versions[-newest:]}
        needed |= {v.version for v in versions if best is not None and v.step == best.step}
        if learner.model.start:
            needed |= {v.version for v in versions[:1]}
        if self._branch == "main":  # other branches are not served
            decisions: defaultdict[str, list[PolicyPromoted]] = defaultdict(list)
            for recorded in await self._broker.read(PolicyPromoted, project=self._project):
                decisions[recorded.event.model].append(recorded.event)
            # The decision in force, and the one to which a rollback goes back. Decisions about other models count too:
            # a version of this model may be the apprentice that answers for an outside model.
            for made in decisions.values():
                for decision in standing_decisions(made)[-2:]:
                    needed |= {v for v in (decision.version, decision.other) if v.startswith(f"{name}@")}
            needed |= {version for version, _ in self._models[name].loaded.anywhere()} | self._models[name].evaluated
            needed |= await self._pinned_versions(name)
        return needed

    async def _publish_retired(self, model: str, version: Version, *, withdrawn: bool = False) -> None:
        """Publish that a version is retired, or that its retirement is withdrawn."""
        await self._broker.publish(
            PolicyRetired(
                project=self._project, model=model, version=version.version, branch=version.branch, withdrawn=withdrawn
            )
        )
        logger.info("version retired", version=version.version, withdrawn=withdrawn)

    def _grace_over(self, version: Version) -> bool:
        """Whether a version was retired, and `retention.grace_s` or more ago."""
        return version.retired_at is not None and version.retired_at / 1e6 + self._settings.grace_s <= time.time()

    async def _remove(self, history: ModelHistory, version: Version) -> None:
        """Remove a version's objects. Branches that trained an equal adapter share one object: the last of them to
        retire it removes it."""
        others = (v for v in history.versions.values() if v.branch != version.branch)
        in_use = any(other.adapter == version.adapter and not self._grace_over(other) for other in others)
        if not in_use:
            await objects.remove(self._broker, streams.ADAPTERS_BUCKET, version.adapter)
            logger.info("adapter removed", version=version.version, adapter=version.adapter)
            if version.state:
                await objects.remove(self._broker, streams.ADAPTERS_BUCKET, version.state)
        history.forget(version)

    # -- who needs a version -------------------------------------------------------------------------------------

    async def _read_new_events(self) -> None:
        """Read the events of versions and the openings of pinned trajectories that came since the last round."""
        entries: Sequence[LogEntry[_PolicyEvent]] = await self._broker.read_all(
            (CheckpointPublished, PolicyLoaded, PolicyUnloaded, PolicyRetired, PolicyEvaluated),
            start_seq=self._next_policy,
            project=self._project,
        )
        for recorded in entries:
            if recorded.event.model in self._models:
                self._models[recorded.event.model].apply(recorded)
            self._next_policy = recorded.seq + 1
        more = self._branch == "main"
        while more:
            page = await self._broker.read_page(TrajectoryOpened, self._next_rollout, project=self._project)
            for opened in page.events:
                if opened.event.pinned:
                    self._pinned[opened.event.trajectory] = opened.event
            self._next_rollout, more = page.last + 1, page.more

    async def _pinned_versions(self, name: str) -> set[str]:
        """The versions that open trajectories of a model are pinned to. Forgets trajectories that have ended."""
        out: set[str] = set()
        for trajectory, opened in list(self._pinned.items()):
            if opened.model != name:
                continue
            keys: dict[str, Any] = {"project": self._project, "trajectory": trajectory}
            group = group_key(opened.group, trajectory)
            completed = await self._broker.read_last(TrajectoryCompleted, **keys, model=opened.model, group_key=group)
            # The stream's retention may have removed the events of a trajectory.
            if completed is not None or await self._broker.read_last(TrajectoryOpened, **keys) is None:
                del self._pinned[trajectory]
            else:
                out.add(opened.pinned)
        return out

    # -- tidying -------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Remove what interrupted uploads left in the object store, and old events."""
        before = int((time.time() - _ORPHAN_AGE_S) * 1e6)
        swept = await objects.sweep(self._broker, streams.ADAPTERS_BUCKET, before)
        if swept:
            logger.info("incomplete uploads removed", objects=swept)
        if self._config.trainer.branch == "main" and self._settings.policy_days:
            await self.delete_old_events(int((time.time() - self._settings.policy_days * streams.DAY_S) * 1e6))

    async def delete_old_events(self, before_us: int) -> int:
        """Delete the events of POLICY that are older than `before_us` (stream time in microseconds) and belong to
        removed versions. Decisions stay: a rollback goes back through them. Returns the number of deleted events."""
        deleted = 0
        for name in self._learners:
            events: Sequence[LogEntry[_PolicyEvent]] = await self._broker.read_all(
                (CheckpointPublished, PolicyLoaded, PolicyUnloaded, PolicyRetired), project=self._project, model=name
            )
            stored = {
                r.event.version
                for r in events
                if isinstance(r.event, CheckpointPublished)
                and await objects.exists(self._broker, streams.ADAPTERS_BUCKET, r.event.adapter)
            }
            for recorded in events:
                # Not the checkpoint of a version that still exists, or a load of it.
                if recorded.place.at < before_us and recorded.event.version not in stored:
                    await self._broker.delete(recorded.stream, recorded.seq)
                    deleted += 1
        if deleted:
            logger.info("old policy events deleted", events=deleted)
        return deleted
