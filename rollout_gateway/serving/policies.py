"""Which policy versions exist and which one a model's name stands for: the POLICY stream, replayed and followed.

Every gateway replica needs every event, so each reads the stream for itself, from the first event on; nothing is kept
elsewhere, and a restarted gateway knows what the one before it knew.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from pipeline.config import SigningConfig
from pipeline.events import CheckpointPublished, DeadLettered, Event, PolicyPromoted, PolicyRetired, encode
from pipeline.log.broker import Broker, Recorded
from pipeline.log.follow import follow_events
from pipeline.log.messages import Place
from pipeline.names import InvalidNameError, parse_version, version_name
from pipeline.security.signing import Trust
from pipeline.telemetry.logs import get_logger

log = get_logger("rollout_gateway.serving.policies")

_FOLLOWED = (CheckpointPublished, PolicyPromoted, PolicyRetired)


@dataclass(eq=False)
class Checkpoint:
    """A published version: its event and the trace it belongs to."""

    event: CheckpointPublished
    traceparent: str = ""


@dataclass(eq=False)
class ModelState:
    """One model of this project."""

    name: str
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    """By version, in the order of publication."""
    promoted: PolicyPromoted | None = None
    promoted_at: tuple[int, int] = (0, 0)
    """Stream time and sequence of the last decision: an older one that comes later changes nothing. The time counts first:
    after a power cut numbers are given again."""

    _main: list[tuple[int, str]] = field(default_factory=list)

    def add(self, checkpoint: Checkpoint) -> None:
        event = checkpoint.event
        known = event.version in self.checkpoints
        self.checkpoints[event.version] = checkpoint
        if event.branch == "main" and not known:
            bisect.insort(self._main, (event.step, event.version))

    def decide(self, event: PolicyPromoted, place: Place) -> bool:
        """Take a decision in; false where a later one holds."""
        if (place.at, place.seq) <= self.promoted_at:
            return False
        self.promoted, self.promoted_at = event if event.version else None, (place.at, place.seq)
        return True

    def newest_first(self) -> Iterator[str]:
        """Versions of the main line from the newest on, without the base."""
        return (version for _, version in reversed(self._main))


class Policies:
    """The models, kept up to date by `follow`."""

    def __init__(self, project: str, models: Iterable[str], trust: Trust | None = None) -> None:
        self.project = project
        self._trust = trust or Trust(SigningConfig())
        self._refused: list[tuple[Recorded[Event], str]] = []
        """Checkpoints that are not the trainer's, and why; not reported yet."""
        self.models = {name: ModelState(name) for name in models}
        self.next_seq = 1
        self._last: Place | None = None
        self.refused: dict[str, str] = {}
        """Versions that must not serve, with the reason."""
        self.retired: set[str] = set()
        """Versions whose adapter retention removes: they serve on where they serve, and nothing new may name them."""

    def out_of_use(self, version: str) -> bool:
        """Whether `version` must not serve or is about to be removed."""
        return version in self.refused or version in self.retired

    def offered(self, version: str) -> bool:
        """Whether a new trajectory may be pinned to `version` and a decision may name it."""
        return self.knows(version) and version not in self.retired

    def knows(self, version: str) -> bool:
        """Whether `version` is a base model or a published checkpoint of a model served here."""
        try:
            name, step = parse_version(version)
        except InvalidNameError:
            return False
        model = self.models.get(name)
        return model is not None and (step == 0 or version in model.checkpoints)

    def checkpoint(self, version: str) -> Checkpoint:
        return self.models[parse_version(version)[0]].checkpoints[version]

    def newest(self, model: str) -> str:
        """The highest version on the main line that may serve; the base where nothing was trained yet."""
        for version in self.models[model].newest_first():
            if version not in self.refused:
                return version
        return version_name(model, 0)

    def names(self, of: str = "") -> list[str]:
        """Every name a client may put into `model`; with `of` those of this model only."""
        out: list[str] = []
        for model in [self.models[of]] if of else self.models.values():
            versions = (v for v in model.checkpoints if v not in self.retired)
            out += [model.name, version_name(model.name, 0), *versions]
        return out

    def apply(self, recorded: Recorded[Event]) -> bool:
        """Take an event in; false where it says nothing new or nothing about this gateway's models."""
        event = recorded.event
        self.next_seq, self._last = recorded.seq + 1, recorded.place
        if not isinstance(event, CheckpointPublished | PolicyPromoted | PolicyRetired):
            return False
        if event.model not in self.models:
            return False
        if isinstance(event, CheckpointPublished | PolicyRetired) and event.branch != "main":
            return False  # trained beside the main line, under names that are taken here
        if isinstance(event, PolicyRetired):
            (self.retired.discard if event.withdrawn else self.retired.add)(event.version)
            return False
        model = self.models[event.model]
        if isinstance(event, PolicyPromoted):
            return model.decide(event, recorded.place)
        before = model.checkpoints.get(event.version)
        if before is not None and before.event.adapter_sha256 == event.adapter_sha256:
            return False
        if objection := self._trust.objection(event):
            self._refused.append((recorded, objection))
            return False
        if before is not None:
            # The log lost the first and the trainer's disk too: the step was trained again.
            log.warning("another checkpoint of that name", version=event.version)
            self.refused.pop(event.version, None)
        model.add(Checkpoint(event, recorded.headers.get("traceparent", "")))
        return True

    async def rebuild(self, broker: Broker) -> None:
        """Read the stream up to now."""
        events = await broker.read_all(_FOLLOWED, project=self.project)
        for recorded in events:
            self.apply(recorded)
        await self._report_refused(broker)
        log.info("policies rebuilt", events=len(events), newest=[self.newest(m) for m in self.models])

    async def follow(self, broker: Broker, changed: Callable[[Recorded[Event]], None]) -> None:
        """For ever: take in each further event and say so to `changed`."""
        followed = follow_events(broker, _FOLLOWED, lambda: self.next_seq, self._last, project=self.project)
        async for recorded in followed:
            if self.apply(recorded):
                changed(recorded)
            await self._report_refused(broker)

    async def _report_refused(self, broker: Broker) -> None:
        """Put refused checkpoints among the dead letters: once each, however many gateways refuse it and however often."""
        while self._refused:
            recorded, why = self._refused.pop()
            log.error("checkpoint refused", reason=why, subject=recorded.subject, seq=recorded.seq)
            place = recorded.place
            letter = DeadLettered(
                project="", stream=recorded.stream, stream_seq=place.seq, stream_at=place.at, original_subject=recorded.subject,
                consumer="gateway", reason="unsigned", detail=why, payload=encode(recorded.event),
            )  # fmt: skip
            await broker.publish_raw(
                f"{letter.subject()}.{place.seq}-{place.at}",
                encode(letter),
                {},
                message_id=letter.message_id(),
            )
