"""Agent runs: open, record, complete; kept in memory for speed and rebuilt from the log wherever they are not.

Any gateway replica can serve any trajectory at any time. Two things make that safe. An exchange is published on the
condition that the last one this replica knows of is still the last in the log, so a stale replica notices, reads again
and takes the next free sequence number. And a completion's subject is unique, so of two completions one wins.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

import msgspec

from pipeline import spans
from pipeline.broker import Broker, HistoryGoneError, Recorded
from pipeline.errors import UndecodableError
from pipeline.events import ExchangeRecorded, TrajectoryCompleted, TrajectoryOpened
from pipeline.log import get_logger
from pipeline.names import name_of_token, subject_token
from rollout_gateway.errors import ApiError, already_completed, unknown_trajectory
from rollout_gateway.tail import tail_raw
from rollout_gateway.trajectory_keys import Keys

log = get_logger("rollout_gateway.trajectories")

_STREAM = "ROLLOUTS"
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_REMEMBERED_CALLS = 8
_SETTLE_S = 30.0
NOT_RECORDED = "exchanges_not_recorded"
"""Metric of a completed trajectory: calls that were answered and are not on the log."""


@dataclass(eq=False, slots=True)
class Trajectory:
    """What must be known of a run while it goes on."""

    opened: TrajectoryOpened
    traceparent: str
    next_seq: int = 0
    exchanges: int = 0
    """Exchange events in the log."""
    last_stream_seq: int = 0
    """Stream sequence of the last of them; 0: none."""
    first_step: int = -1
    last_step: int = -1
    recent: OrderedDict[str, list[int]] = field(default_factory=OrderedDict)
    """Request hash to the stream sequences of its exchange events, of the last few calls."""
    in_flight: int = 0
    """Calls that are not answered yet, and those whose exchange is being recorded."""
    not_recorded: int = 0
    """Calls that were answered and that the log did not take, with `gateway.capture = "async"`."""
    used_at: float = 0.0
    replica: str = ""
    """The inference server that holds its prefix."""
    completing: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        return self.opened.trajectory

    def begin(self) -> None:
        if self.completing:
            raise already_completed(self.id, "it takes no further calls")
        self.in_flight += 1
        self.used_at = time.monotonic()
        self.idle.clear()

    def end(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """`begin` and `end` around a call."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def hold(self) -> None:
        """Count a record that goes on after its call was answered; `end` ends it. A completion waits for both."""
        self.in_flight += 1
        self.idle.clear()

    def note(self, event: ExchangeRecorded, stream_seq: int) -> None:
        """Take in an exchange that the log holds."""
        self.exchanges += 1
        self.next_seq = max(self.next_seq, event.seq + 1)
        self.last_stream_seq = stream_seq
        self.first_step = event.step if self.first_step < 0 else min(self.first_step, event.step)
        self.last_step = max(self.last_step, event.step)
        if event.request_hash and event.status == "complete":
            if event.choice == 0:
                self.recent[event.request_hash] = [stream_seq]
                if len(self.recent) > _REMEMBERED_CALLS:
                    self.recent.popitem(last=False)
            elif event.request_hash in self.recent:
                self.recent[event.request_hash].append(stream_seq)


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/trajectories/<id>/complete`."""

    reward: float | None = None
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    metadata: msgspec.Raw = msgspec.Raw(b"{}")
    outcome: str = "scored"
    inferred: bool = False


def same_completion(a: TrajectoryCompleted, b: TrajectoryCompleted) -> bool:
    """Whether two completions say the same, so that one may be a client's retry of the other."""
    return (a.outcome, a.reward, a.rewards, a.metrics, bytes(a.metadata)) == (
        b.outcome, b.reward, b.rewards, b.metrics, bytes(b.metadata),
    )  # fmt: skip


class Registry:
    """The trajectories this replica knows, the rest being in the log."""

    def __init__(self, broker: Broker, project: str, keys: Keys, *, keep: int = 100_000) -> None:
        self._broker, self.project, self.keys, self._keep = broker, project, keys, keep
        self._known: dict[str, Trajectory] = {}
        self._loading: dict[str, asyncio.Task[Trajectory]] = {}
        self._heeded = 1
        self.not_recorded = 0
        """Calls that were answered and that the log did not take, of all runs, with `gateway.capture = "async"`."""

    def __len__(self) -> int:
        return len(self._known)

    def known(self) -> list[Trajectory]:
        return list(self._known.values())

    # -- finding -------------------------------------------------------------------------------------------------

    async def find(self, trajectory: str) -> Trajectory:
        """An open trajectory; raises a 404 or, where it is completed, a 409 `ApiError`."""
        found = self._known.get(trajectory)
        if found is not None:
            return found
        task = self._loading.get(trajectory)
        if task is None:
            task = asyncio.ensure_future(self._load(trajectory))
            self._loading[trajectory] = task
            task.add_done_callback(lambda _: self._loading.pop(trajectory, None))
        return await asyncio.shield(task)

    def get(self, trajectory: str) -> Trajectory | None:
        """An open trajectory in memory, or `None`."""
        return self._known.get(trajectory)

    async def opened(self, trajectory: str) -> TrajectoryOpened | None:
        """How a trajectory was opened, open or completed; `None` where it never was. One read of one event at most."""
        found = self._known.get(trajectory)
        if found is not None:
            return found.opened
        recorded = await self._opening(trajectory)
        return recorded.event if recorded is not None else None  # type: ignore[return-value]  # of that type

    async def _load(self, trajectory: str) -> Trajectory:
        found = await self._begun(trajectory)
        if found is None:
            raise unknown_trajectory(trajectory)
        if await self.completion(found.opened) is not None:  # before its calls are read: they may be many
            raise already_completed(trajectory, "it takes no further calls")
        await self._read_exchanges(found)
        return self._remember(found)

    def _remember(self, found: Trajectory) -> Trajectory:
        known = self._known.setdefault(found.id, found)
        known.used_at = time.monotonic()
        if len(self._known) > self._keep:
            self._forget_some()
        return known

    def _forget_some(self) -> None:
        """The log knows them all: forget the tenth that was unused longest."""
        idle = [t for t in self._known.values() if not t.in_flight]
        for trajectory in sorted(idle, key=lambda t: t.used_at)[: max(1, self._keep // 10)]:
            del self._known[trajectory.id]

    async def _opening(self, trajectory: str) -> Recorded | None:
        subject = f"rollout.opened.{subject_token(self.project)}.{subject_token(trajectory)}"
        opened = await self._broker.last(_STREAM, subject)
        return opened if opened is not None and isinstance(opened.event, TrajectoryOpened) else None

    async def _begun(self, trajectory: str) -> Trajectory | None:
        """From the log, without its calls; `None` where it was never opened."""
        opened = await self._opening(trajectory)
        if opened is None or not isinstance(opened.event, TrajectoryOpened):
            return None
        return Trajectory(opened.event, opened.headers.get("traceparent", ""))

    async def _read_exchanges(self, found: Trajectory) -> None:
        subject, more = self._exchange_subject(found), True
        while more:
            page = await self._broker.page(_STREAM, subject, found.last_stream_seq + 1)
            for recorded in page.events:
                if isinstance(recorded.event, ExchangeRecorded):
                    found.note(recorded.event, recorded.seq)
            # Past what could not be decoded too: the next exchange is published behind it.
            found.last_stream_seq, more = max(found.last_stream_seq, page.last), page.more

    def _exchange_subject(self, found: Trajectory) -> str:
        return f"rollout.exchange.{subject_token(self.project)}.{subject_token(found.id)}"

    async def completion(self, opened: TrajectoryOpened) -> TrajectoryCompleted | None:
        names = (self.project, opened.model, opened.trajectory)
        subject = ".".join(("rollout.completed", *(subject_token(n) for n in names)))
        last = await self._broker.last(_STREAM, subject)
        return last.event if last is not None and isinstance(last.event, TrajectoryCompleted) else None

    async def held(self, trajectory: str) -> Trajectory:
        """A trajectory to read from, open or completed, without its calls if it is not in memory. Raises a 404 `ApiError`."""
        found = self._known.get(trajectory) or await self._begun(trajectory)
        if found is None:
            raise unknown_trajectory(trajectory)
        return found

    async def describe(self, trajectory: str) -> tuple[TrajectoryOpened, TrajectoryCompleted | None, int]:
        """How an open or completed trajectory was opened and completed, and how many exchange events it has. Reads two
        events and a count, however long the run is. Raises a 404 `ApiError`."""
        opened = await self.opened(trajectory)
        if opened is None:
            raise unknown_trajectory(trajectory)
        completed = await self.completion(opened)
        if completed is not None:
            return opened, completed, completed.exchanges
        subject = f"rollout.exchange.{subject_token(self.project)}.{subject_token(trajectory)}"
        return opened, None, await self._broker.count(_STREAM, subject)

    async def last_answer(self, found: Trajectory) -> ExchangeRecorded | None:
        """The newest complete exchange of an open trajectory; its first choice, where it has several."""
        for request_hash in reversed(found.recent):
            if call := await self.recorded_call(found, request_hash):
                return call[0]
        return None

    async def unfinished(self, prefix: str) -> list[str]:
        """Names, of those that begin with `prefix`, that the log holds opened and not completed. Reads all subjects."""
        project = subject_token(self.project)
        names: dict[str, set[str]] = {}
        for kind in ("opened", "completed"):
            filtered = f"rollout.{kind}.{project}.>"
            subjects = await self._broker.subjects(_STREAM, filtered)
            tokens = (subject.rpartition(".")[2] for subject in subjects)
            names[kind] = {name_of_token(t) for t in tokens if t.startswith(prefix)}
        return sorted(names["opened"] - names["completed"])

    async def refresh(self, found: Trajectory) -> bool:
        """Take in what other replicas recorded; whether there was anything."""
        before = found.exchanges
        await self._read_exchanges(found)
        return found.exchanges > before

    async def exchange_of(self, found: Trajectory, reply: str) -> ExchangeRecorded | None:
        """The complete exchange whose reply has the id `reply`, or `None`. The newest are looked at first."""
        for seqs in reversed(found.recent.values()):
            try:
                event = (await self._broker.get(_STREAM, seqs[0])).event
            except HistoryGoneError:
                continue
            if (
                isinstance(event, ExchangeRecorded)
                and event.trajectory == found.id
                and _reply_id(event) == reply
            ):
                return event
        subject, last, more = self._exchange_subject(found), 0, True
        while more:
            page = await self._broker.page(_STREAM, subject, last + 1)
            last, more = page.last, page.more
            for recorded in page.events:
                event = recorded.event
                if (
                    isinstance(event, ExchangeRecorded)
                    and event.status == "complete"
                    and _reply_id(event) == reply
                ):
                    return event
        return None

    async def recorded_call(self, found: Trajectory, request_hash: str) -> list[ExchangeRecorded]:
        """The exchange events (one a choice) of a recent call; empty where there is none."""
        seqs = found.recent.get(request_hash, [])
        try:
            events = [(await self._broker.get(_STREAM, seq)).event for seq in seqs]
        except HistoryGoneError:
            return []
        calls = [e for e in events if isinstance(e, ExchangeRecorded)]
        # After a power cut another run's call may lie under a number: then this call is not recorded any more.
        ours = all(e.trajectory == found.id and e.request_hash == request_hash for e in calls)
        return calls if ours else []

    async def begin(self) -> None:
        """Note where the log stands: `heed_completions` tells of what is completed from now on."""
        self._heeded = (await self._broker.stream_info(_STREAM)).state.last_seq + 1

    async def heed_completions(self) -> None:
        """For ever: forget trajectories that other replicas complete, so that their calls are refused here too.

        The log is followed, so a completion is heeded also where this replica was cut off as it came."""
        subjects = [f"rollout.completed.{subject_token(self.project)}.>"]
        async with aclosing(tail_raw(self._broker, _STREAM, subjects, lambda: self._heeded)) as messages:
            async for raw in messages:
                found = self._known.pop(name_of_token(raw.subject.rpartition(".")[2]), None)
                if found is not None:
                    found.completing = True

    # -- changing ------------------------------------------------------------------------------------------------

    async def open(self, event: TrajectoryOpened, traceparent: str) -> Trajectory:
        """Open a trajectory; the same again (a retry) is answered alike, another of that name is a 409 `ApiError`."""
        traceparent = traceparent or spans.traceparent(self.project, event.trajectory)
        ack = await self._broker.publish(event, {"traceparent": traceparent})
        if not ack.duplicate:
            return self._remember(Trajectory(event, traceparent))
        found = self._known.get(event.trajectory) or await self._begun(event.trajectory)
        if found is None or not _same_opening(found.opened, event):
            raise ApiError(
                409,
                f"Trajectory {event.trajectory!r} was opened before, and differently.",
                kind="conflict_error",
                code="trajectory_exists",
            )
        if await self.completion(found.opened) is not None:
            raise already_completed(event.trajectory, "choose another id")
        if event.trajectory not in self._known:
            await self._read_exchanges(found)
        return self._remember(found)

    async def record(
        self, found: Trajectory, make: Callable[[int], list[ExchangeRecorded]], traceparent: str
    ) -> int:
        """Put one call on the log: `make` gives its events (one a choice) for a sequence number, which is returned.

        Safe with other calls of the trajectory, here and on other replicas: each call gets a number of its own."""
        async with found.lock:
            while True:
                events = make(found.next_seq)
                if await self._publish(found, events[0], traceparent):
                    break
            for event in events[1:]:
                # The number is ours now: another replica that comes between two choices has taken a later one.
                while not await self._publish(found, event, traceparent):
                    pass
            return events[0].seq

    async def _publish(self, found: Trajectory, event: ExchangeRecorded, traceparent: str) -> bool:
        """False where another replica wrote to the trajectory first; what it wrote is taken in then."""
        headers = {"traceparent": traceparent or found.traceparent, _EXPECTED: str(found.last_stream_seq)}
        ack = await self._broker.publish(event, headers)
        if ack.duplicate and not await self._is_at(event, ack.seq):
            log.info("another replica wrote to the trajectory", trajectory=found.id)
            await self._read_exchanges(found)
            return False
        found.note(event, ack.seq)
        return True

    async def _is_at(self, event: ExchangeRecorded, stream_seq: int) -> bool:
        """Whether it is this event that the log holds there. One that retention took was ours: its message id said so."""
        try:
            return (await self._broker.get(_STREAM, stream_seq)).event == event
        except UndecodableError:
            raise
        except HistoryGoneError:
            return True

    async def complete(self, trajectory: str, body: Completion) -> TrajectoryCompleted:
        """End a trajectory; the same again is answered alike, a different one is a 409 `ApiError`."""
        try:
            found = await self.find(trajectory)
        except ApiError as error:
            if error.code != "trajectory_completed":
                raise
            return await self._complete_again(trajectory, body)
        if found.in_flight:
            try:
                async with asyncio.timeout(_SETTLE_S):
                    await found.idle.wait()
            except TimeoutError:
                raise ApiError(
                    409,
                    f"Trajectory {trajectory!r} still has {found.in_flight} calls in flight.",
                    kind="conflict_error",
                    code="calls_in_flight",
                ) from None
        found.completing = True
        try:
            await self._read_exchanges(found)  # what other replicas recorded
            event = _completed(found, body)
            ack = await self._broker.publish(event, {"traceparent": found.traceparent})
        except BaseException:
            found.completing = False
            raise
        self._known.pop(trajectory, None)
        if ack.duplicate:
            return await self._complete_again(trajectory, body)
        return event

    async def _complete_again(self, trajectory: str, body: Completion) -> TrajectoryCompleted:
        opened, before, _ = await self.describe(trajectory)
        found = Trajectory(opened, "")
        if before is not None:  # how many it knew was known to the replica that completed it only
            found.not_recorded = int(before.metrics.get(NOT_RECORDED, 0))
        if before is None or not same_completion(before, _completed(found, body)):
            raise already_completed(trajectory, "it can't be completed again with other results")
        return before


class _Reply(msgspec.Struct):
    id: str = ""


def _reply_id(event: ExchangeRecorded) -> str:
    return msgspec.json.decode(event.response, type=_Reply).id


def _same_opening(a: TrajectoryOpened, b: TrajectoryOpened) -> bool:
    return msgspec.structs.replace(a, at=0, paced_s=0) == msgspec.structs.replace(b, at=0, paced_s=0)


def _completed(found: Trajectory, body: Completion) -> TrajectoryCompleted:
    opened, outcome, metrics = found.opened, body.outcome, body.metrics
    if found.not_recorded:
        # What is missing on the log can't be trained: infrastructure failed, which never becomes a reward.
        outcome, metrics = "no_result", {**metrics, NOT_RECORDED: float(found.not_recorded)}
    return TrajectoryCompleted(
        project=opened.project,
        trajectory=opened.trajectory,
        model=opened.model,
        group=opened.group,
        task=opened.task,
        attempt=opened.attempt,
        split=opened.split,
        group_size=opened.group_size,
        outcome=outcome,  # type: ignore[arg-type]  # checked when the body was read
        reward=body.reward,
        rewards=body.rewards,
        metrics=metrics,
        metadata=bytes(body.metadata),
        exchanges=found.exchanges,
        first_step=max(found.first_step, 0),
        last_step=max(found.last_step, 0),
        opened_at=opened.at,
        inferred=body.inferred,
    )
