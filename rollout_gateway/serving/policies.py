"""The policy versions that exist, decisions about them, and the servers that have loaded them.

All of it is built from the events of the stream POLICY. Every gateway and every sampler agent reads the whole stream
when it starts (`rebuild`) and applies what follows (`follow`), so a restart loses nothing.

A "branch" is training beside `main`; it is served under a name of its own, `<model>+<branch>`. It is loaded when a call
names it, and no decision can be made about it. An "apprentice" is a policy that may answer in place of an outside
model, its "master". A "replica" is an inference server.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from pipeline.config import SigningConfig
from pipeline.events import (
    CheckpointPublished,
    DeadLettered,
    Event,
    PolicyLoaded,
    PolicyPromoted,
    PolicyRetired,
    PolicyUnloaded,
    encode,
)
from pipeline.log.broker import Broker, LogEntry
from pipeline.log.follow import follow_events
from pipeline.log.messages import Place
from pipeline.names import branch_model, is_base_version, is_name, is_outside, is_version, outside_version, version_name
from pipeline.security.signing import Trust
from pipeline.telemetry.logs import get_logger
from pipeline.versions.loaded import LoadedVersions

logger = get_logger("rollout_gateway.serving.policies")

_FOLLOWED = (CheckpointPublished, PolicyPromoted, PolicyRetired, PolicyLoaded, PolicyUnloaded)


@dataclass(eq=False)
class Checkpoint:
    """A published version."""

    event: CheckpointPublished
    """As published; of a branch, with the names of model and version under which it is served."""
    base: str
    """Name of the base version."""


@dataclass(eq=False)
class ModelState:
    """One model of this project."""

    name: str
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    """Checkpoints by version, in the order of publication."""
    decided: PolicyPromoted | None = None
    """The last decision, of any kind."""
    decided_seq: int = 0
    """Stream sequence of the last decision."""
    _by_step: list[tuple[int, str]] = field(default_factory=list)
    """Step and version of all checkpoints, sorted."""

    @property
    def promoted(self) -> PolicyPromoted | None:
        """The decision that routes the model name to a version; `None` while the name follows the newest version."""
        return self.decided if self.decided is not None and self.decided.version else None

    def add(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint, or replace the one of the same version."""
        event = checkpoint.event
        known = event.version in self.checkpoints
        self.checkpoints[event.version] = checkpoint
        if not known:
            bisect.insort(self._by_step, (event.step, event.version))

    def decide(self, event: PolicyPromoted, seq: int) -> bool:
        """Apply a decision, which is message `seq` of the log. Return false if it or a later one was applied
        already."""
        if seq <= self.decided_seq:
            return False
        self.decided, self.decided_seq = event, seq
        return True

    def newest_first(self) -> Iterator[str]:
        """Yield the versions, the newest first, without the base version."""
        return (version for _, version in reversed(self._by_step))


class Policies:
    """The models, kept up to date by `follow`."""

    def __init__(
        self,
        project: str,
        models: Iterable[str],
        trust: Trust | None = None,
        *,
        apprentices: Mapping[str, str] | None = None,
        dead_letters: bool = True,
    ) -> None:
        """`trust` checks the signatures of checkpoints. A checkpoint without a valid signature is never served; with
        `dead_letters`, as in gateways, it also becomes a dead letter. `apprentices`: by outside model, the policy that
        may answer in its place."""
        self.project = project
        self._trust, self._dead_letters = trust or Trust(SigningConfig()), dead_letters
        self._unsigned: list[tuple[LogEntry[Event], str]] = []
        """Checkpoints without a valid signature that are not reported yet, each with the reason."""
        self.models = {name: ModelState(name) for name in models}
        self.apprentices = dict(apprentices or {})
        self.routed = self.models | {name: ModelState(name) for name in self.apprentices}
        """What decisions are about: the models, and the outside models that have an apprentice."""
        self.branches: dict[str, ModelState] = {}
        """What was trained on other branches, by the name under which it is served. Each has a version at least."""
        self._loaded = LoadedVersions()
        self.loads_seq = 0
        """Sequence of the last `policy.loaded` or `policy.unloaded` event that was applied."""
        self.next_seq = 1
        """Stream sequence of the next event to apply."""
        self._last: Place | None = None
        """Place of the last event that was applied: `follow` notices by it if the log has lost its end."""
        self.refused: dict[str, str] = {}
        """Versions that failed a check on every inference server, with the reason."""
        self.retired: set[str] = set()
        """Versions whose adapter is about to be deleted. Calls that use them continue; new trajectories and decisions
        can't name them."""

    def answering_models(self, model: str) -> tuple[str, ...]:
        """Return the models that answer the runs which agents open under the name `model`: itself, and the apprentice
        of an outside model."""
        return tuple(filter(None, (model, self.apprentices.get(model))))

    def decided_versions(self) -> list[str]:
        """Return the policy versions that the decisions in force name, without outside models."""
        decisions = (state.promoted for state in self.routed.values())
        named = (version for d in decisions if d is not None for version in (d.version, d.other))
        return [version for version in named if version and not is_outside(version)]

    def state(self, model: str) -> ModelState | None:
        """Return the model or branch that is served as `model`; `None` if there is none."""
        return self.models.get(model) or self.branches.get(model)

    def knows(self, version: str) -> bool:
        """Return whether `version` is a base version or a published checkpoint of a model served here. A branch has no
        base version of its own."""
        is_base = is_base_version(version) and version.rpartition("@")[0] in self.models
        return is_base or self.checkpoint(version) is not None

    def checkpoint(self, version: str) -> Checkpoint | None:
        """Return the published checkpoint of `version`; `None` for a base version, which has no adapter, and for an
        unknown one."""
        model = self.state(version.rpartition("@")[0])
        return model.checkpoints.get(version) if model is not None else None

    def is_published(self, version: str, sha256: str) -> bool:
        """Return whether `version` was published with the adapter that has this SHA-256."""
        checkpoint = self.checkpoint(version)
        return checkpoint is not None and checkpoint.event.adapter_sha256 == sha256

    def loaded(self, replica: str, server_start: str) -> dict[str, str]:
        """Return the SHA-256 by version of the published adapters that a server process has loaded."""
        loaded = self._loaded.at(replica, server_start)
        return {version: sha256 for version, sha256 in loaded.items() if self.is_published(version, sha256)}

    def newest(self, model: str, refused: Container[str] | None = None) -> str:
        """Return the newest version of a model that is not refused; the base version if there is none. Of a branch,
        which has no base version, the newest version: give no `refused`.

        `refused`: versions to skip instead of `self.refused`."""
        refused, state = self.refused if refused is None else refused, self.state(model)
        for version in state.newest_first() if state is not None else ():
            if version not in refused:
                return version
        return version_name(model, 0)

    def newest_loaded_anywhere(self, model: str) -> str:
        """Return the newest version of the model that any server has loaded; empty if there is none."""
        loaded = {version for version, sha256 in self._loaded.anywhere() if self.is_published(version, sha256)}
        return next((version for version in self.models[model].newest_first() if version in loaded), "")

    def versions(self, model: str) -> list[str]:
        """Return the versions of a model that a new trajectory or a decision may name."""
        return [name for name in self.names(model) if name != model]

    def names(self, only: str = "") -> list[str]:
        """Return every name that a client may put into `model`. `only`: a model, to return its names only."""
        out: list[str] = []
        for model in (*self.models.values(), *self.branches.values()):
            if only in ("", model.name):
                base = [version_name(model.name, 0)] if model.name in self.models else []
                out += [model.name, *base, *(v for v in model.checkpoints if v not in self.retired)]
        return out

    def apply(self, recorded: LogEntry[Event]) -> bool:
        """Apply an event of the stream, in its order. Return whether it changes the versions, decisions or loaded
        adapters of these models. What is not about them, or names no version, changes nothing."""
        event = recorded.event
        self.next_seq, self._last = recorded.seq + 1, recorded.place
        match event:
            case PolicyLoaded() | PolicyUnloaded() if self.state(event.model) is not None:
                self._loaded.apply(event)
                self.loads_seq = recorded.seq
                return True
            case PolicyPromoted() if state := self.routed.get(event.model):
                itself = {outside_version(event.model)} if event.model in self.apprentices else set()
                named = {event.version, event.other} - itself
                return _are_versions(named, recorded.seq) and state.decide(event, recorded.seq)
            case CheckpointPublished() | PolicyRetired() if event.model in self.models:
                return _are_versions({event.version}, recorded.seq) and self._apply_version(event, recorded)
        return False

    def _apply_version(self, event: CheckpointPublished | PolicyRetired, recorded: LogEntry[Event]) -> bool:
        """Apply an event about a version, of `main` or of a branch. Return whether there is a new one to serve."""
        name = event.model if event.branch == "main" else branch_model(event.model, event.branch)
        version = f"{name}@{event.version.rpartition('@')[2]}"
        if event.branch != "main" and (name in self.models or not is_name(version)):
            return False  # a model has this name, or it would be too long: such a branch is not served
        if isinstance(event, PolicyRetired):
            (self.retired.discard if event.withdrawn else self.retired.add)(version)
            return False
        model = self.state(name) or ModelState(name)
        before = model.checkpoints.get(version)
        if before is not None and before.event.adapter_sha256 == event.adapter_sha256:
            return False
        if objection := self._trust.objection(event):
            self._unsigned.append((recorded, objection))
            return False
        served = msgspec.structs.replace(event, model=name, version=version)
        model.add(Checkpoint(served, version_name(event.model, 0)))
        if name not in self.models:
            self.branches[name] = model
        return True

    async def rebuild(self, broker: Broker) -> None:
        """Read and apply the stream up to its present end."""
        events = await broker.read_all(_FOLLOWED, project=self.project)
        for recorded in events:
            self.apply(recorded)
        await self._report_unsigned(broker)
        logger.info("policies rebuilt", events=len(events), newest=[self.newest(m) for m in self.models])

    async def follow(self, broker: Broker, changed: Callable[[LogEntry[Event]], None]) -> None:
        """Apply further events as they arrive. Call `changed` with each for which `apply` returns true. Never
        returns."""
        followed = follow_events(broker, _FOLLOWED, lambda: self.next_seq, self._last, project=self.project)
        async for recorded in followed:
            if self.apply(recorded):
                changed(recorded)
            await self._report_unsigned(broker)

    async def _report_unsigned(self, broker: Broker) -> None:
        """Log each refused checkpoint and publish it as a dead letter. The message id makes the log keep one dead
        letter however many gateways publish it."""
        while self._unsigned:
            recorded, why = self._unsigned.pop()
            logger.error("checkpoint refused", reason=why, subject=recorded.subject, seq=recorded.seq)
            if not self._dead_letters:
                continue
            place = recorded.place
            letter = DeadLettered(
                project="",
                stream=recorded.stream,
                stream_seq=place.seq,
                stream_at=place.at,
                original_subject=recorded.subject,
                consumer="gateway",
                reason="unsigned",
                detail=why,
                payload=encode(recorded.event),
            )
            await broker.publish_raw(f"{letter.subject()}.{place.seq}-{place.at}", encode(letter), {})


def _are_versions(names: set[str], seq: int) -> bool:
    """Return whether all names in an event, but empty ones, are policy versions. Log an error if not: whoever may write
    to the log may write any name. `seq`: of the event, for the error."""
    if all(is_version(name) for name in names if name):
        return True
    logger.error("event ignored: it names no policy version", versions=sorted(names), seq=seq)
    return False
