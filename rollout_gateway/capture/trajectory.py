"""One agent run in memory: its calls, recorded on the log under sequence numbers that no other replica gives twice.

An exchange is published on the condition that the last one this replica knows of is still the last on the log. A
replica that is behind notices, reads again and takes the next free number. After a power cut the log may have lost its
end; a run that was lost in part is read again from what the log still holds.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from pipeline.events import ExchangeRecorded, TrajectoryOpened
from pipeline.log.broker import BrokerError, HistoryGoneError
from pipeline.log.messages import Page
from pipeline.log.subjects import subject_filter
from pipeline.telemetry.logs import get_logger
from rollout_gateway.capture.run_log import STREAM, RunLog, same_opening
from rollout_gateway.http.errors import ApiError, already_completed

log = get_logger("rollout_gateway.capture.trajectory")

_REMEMBERED_CALLS = 8


class Recordable(Protocol):
    """A call that can be recorded."""

    @property
    def traceparent(self) -> str:
        """W3C trace context of the call; empty for that of the trajectory."""

    def events(self, seq: int) -> list[ExchangeRecorded]:
        """The events of the call, one for each choice, under the sequence number `seq`."""


@dataclass(eq=False, slots=True)
class RecordedCalls:
    """The calls of a run that are on the log."""

    exchanges: int = 0
    """Number of exchange events."""
    next_seq: int = 0
    last_stream_seq: int = 0
    """Stream sequence of the last message on the run's subject; 0 if there is none."""
    last_at: int = 0
    """`at` of the exchange in that message; 0 if it holds no exchange."""
    not_whole: int = 0
    """Number of further exchange events, whose tokens can't be read because what they continue is gone."""
    first_step: int = -1
    last_step: int = -1
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    calls_us: int = 0
    """Microseconds that the calls took, added up."""
    recent: OrderedDict[str, list[int]] = field(default_factory=OrderedDict)
    """Stream sequences of the events of the last few complete calls, by request hash."""
    replies: dict[tuple[str, int], int] | None = None
    """Stream sequences of the complete exchanges by the reply's id and the choice, in a run whose answers carry
    references. `None` in any other run."""

    def add(self, event: ExchangeRecorded, stream_seq: int) -> None:
        self.exchanges += 1
        self.next_seq = max(self.next_seq, event.seq + 1)
        self.last_stream_seq, self.last_at = stream_seq, event.at
        self.first_step = event.step if self.first_step < 0 else min(self.first_step, event.step)
        self.last_step = max(self.last_step, event.step)
        if self.replies is not None and event.status == "complete":
            self.replies[_reply_id(event), event.choice] = stream_seq
        self.sampled_tokens += len(event.sampled_ids) // 4
        if event.choice == 0:
            self.prompt_tokens += len(event.prompt_ids) // 4
            self.calls_us += max(event.at - event.started_at, 0) if event.started_at else 0
        if event.request_hash and event.status == "complete":
            if event.choice == 0:
                self.recent[event.request_hash] = [stream_seq]
                if len(self.recent) > _REMEMBERED_CALLS:
                    self.recent.popitem(last=False)
            elif event.request_hash in self.recent:
                self.recent[event.request_hash].append(stream_seq)


@dataclass(eq=False, slots=True)
class Trajectory:
    """An open run."""

    log: RunLog
    opened: TrajectoryOpened
    traceparent: str = ""
    reconnects: int = 0
    """`RunLog.reconnects` when the log was last seen to hold everything in `recorded`."""
    recorded: RecordedCalls = field(default_factory=RecordedCalls)
    rebuilt: int = 0
    """How often `recorded` was read again because the log had lost a part of it."""
    in_flight: int = 0
    """Calls that are not answered yet or whose record is being written."""
    not_recorded: int = 0
    """Calls that were answered and are not on the log: the log refused them (with `gateway.capture = "async"`) or lost
    them in a power cut."""
    used_at: float = 0.0
    """Time of the last call, by `time.monotonic`."""
    completions: int = 0
    """Completions under way in this process, which publish what `recorded` says."""
    completed: bool = False
    """It is completed, here or by another gateway process: what is not recorded yet would come too late."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a call is recorded."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no call is in flight."""

    def __post_init__(self) -> None:
        self.recorded = self._no_calls()

    def _no_calls(self) -> RecordedCalls:
        return RecordedCalls(replies={} if self.opened.references else None)

    @property
    def id(self) -> str:
        return self.opened.trajectory

    # -- calls in flight -----------------------------------------------------------------------------------------

    @property
    def completing(self) -> bool:
        """Whether it is completed or about to be, and takes no further calls."""
        return self.completed or self.completions > 0

    @contextmanager
    def closed_to_calls(self) -> Iterator[None]:
        """Let no call begin. After a failure, calls may begin again once no other completion is under way."""
        self.completions += 1
        try:
            yield
        finally:
            self.completions -= 1

    def begin(self) -> None:
        """Count a call that begins. Raises an `ApiError`: 409 if the trajectory is being completed, 410 if it
        expired."""
        self.log.check_age(self.id, self.opened.at)
        if self.completing:
            raise already_completed(self.id, "it takes no further calls")
        self.used_at = time.monotonic()
        self.hold()

    def hold(self) -> None:
        """Count work that a completion has to wait for. `end` ends it."""
        self.in_flight += 1
        self.idle.clear()

    def end(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()

    # -- recording -----------------------------------------------------------------------------------------------

    async def record(self, call: Recordable) -> int:
        """Publish a call under the next free sequence number, and return that number.

        Safe beside other calls of the trajectory, on this replica and on others. Raises `BrokerError` if the log does
        not take the call, and a 409 `ApiError` if another gateway process completed the trajectory, or the log lost it
        and another one took its id."""
        async with self.lock:
            while True:
                if self.completed:
                    raise already_completed(self.id, "this call was not recorded")
                await self._check_for_loss()
                events = call.events(self.recorded.next_seq)
                if await self._publish_all(events, call.traceparent or self.traceparent):
                    return events[0].seq

    async def _publish_all(self, events: list[ExchangeRecorded], traceparent: str) -> bool:
        rebuilt = self.rebuilt
        if not await self._publish(events[0], traceparent):
            return False
        for event in events[1:]:
            # The first choice reserved the number. Another replica that writes between two choices takes a later one.
            while not await self._publish(event, traceparent):
                if self.rebuilt != rebuilt:
                    return False  # the log lost the first choice, so the number may belong to another call
        return True

    async def _publish(self, event: ExchangeRecorded, traceparent: str) -> bool:
        """Publish one event, on the condition that the trajectory's last message on the log is the one known here.
        Returns whether the log holds it. If not, `recorded` was brought up to date, and the caller may try again.

        Raises `BrokerError` if the log refuses the event although `recorded` is up to date."""
        known = self.recorded
        broker = self.log.broker
        form = broker.exchanges.shortest(event)
        headers = {"traceparent": traceparent}
        ack = await broker.publish(event, headers, form=form, after=known.last_stream_seq)
        # A duplicate: the condition did not hold. What was written after the known message may be this event, by an
        # earlier attempt of this publish whose acknowledgement was lost.
        published = not ack.duplicate or await self._is_at(event, ack.seq)
        if await self._check_for_loss():
            return published  # `recorded` was read again, with this event if the log holds it
        if published:
            known.add(event, ack.seq)
            broker.exchanges.add(event, form)
            return True
        log.info("another replica wrote to the trajectory", trajectory=self.id)
        before = known.next_seq, known.last_stream_seq
        await self._read(known)
        if (known.next_seq, known.last_stream_seq) == before:
            await self._rebuild()  # nothing new was read, so `recorded` holds messages that the log lost
            if (self.recorded.next_seq, self.recorded.last_stream_seq) == before:
                raise BrokerError(
                    f"call {event.seq} of trajectory {self.id!r} can't be recorded: {STREAM} refuses it because of "
                    f"message {ack.seq}, which is gone now; has the stream's retention been changed?"
                )
        return False

    async def _is_at(self, event: ExchangeRecorded, stream_seq: int) -> bool:
        """Whether message `stream_seq` of the log is `event`."""
        try:
            return (await self.log.broker.read_at(ExchangeRecorded, stream_seq)).event == event
        except HistoryGoneError:  # gone, another event, or not whole: nothing that counts as recorded
            return False

    # -- keeping up with the log ---------------------------------------------------------------------------------

    async def read_calls(self) -> None:
        """Read the calls that are on the log and not in `recorded`."""
        await self._read(self.recorded)

    async def _read(self, into: RecordedCalls) -> None:
        more = True
        while more:
            page = await self._page(into.last_stream_seq)
            for recorded in page.events:
                into.add(recorded.event, recorded.seq)
            for seq in page.not_whole:
                into.not_whole += 1
                into.next_seq = max(into.next_seq, seq + 1)
            if page.last > into.last_stream_seq:
                # Undecodable messages count too: the next exchange must name the last message, whatever it is.
                into.last_stream_seq, into.last_at = page.last, 0
            more = page.more

    async def _page(self, after: int) -> Page[ExchangeRecorded]:
        broker = self.log.broker
        return await broker.read_page(
            ExchangeRecorded, after + 1, project=self.log.project, trajectory=self.id
        )

    async def refresh(self) -> bool:
        """Read what other replicas recorded. Returns whether there was anything."""
        async with self.lock:
            before = self.recorded.exchanges, self.recorded.next_seq, self.rebuilt
            await self.read_calls()
            await self._check_for_loss()
            return (self.recorded.exchanges, self.recorded.next_seq, self.rebuilt) != before

    async def _check_for_loss(self) -> bool:
        """After a reconnection: read the run again if the server came back without the end of its log. Returns whether
        it had."""
        reconnects = self.log.reconnects
        if self.reconnects == reconnects:
            return False
        lost = await self._is_lost()
        if lost:
            await self._rebuild()
        self.reconnects = reconnects
        return lost

    async def _is_lost(self) -> bool:
        """Whether the log no longer holds the last message that is known here."""
        known = self.recorded
        if not known.last_stream_seq:
            opening = await self.log.opening(self.id)
            return opening is None or not same_opening(opening.event, self.opened)
        raw = await self.log.broker.leader_get(STREAM, {"seq": known.last_stream_seq})
        if raw is None:  # retention removes messages too, but never gives their numbers again
            info = await self.log.broker.stream_info(STREAM)
            return int(info.state.last_seq) < known.last_stream_seq
        if raw.subject != subject_filter(ExchangeRecorded, project=self.log.project, trajectory=self.id):
            return True
        recorded = await self.log.broker.recorded(STREAM, raw)
        at = recorded.event.at if recorded is not None else 0
        return bool(known.last_at) and at != known.last_at

    async def _rebuild(self) -> None:
        """Make `recorded` what the log holds. Calls that were answered and are not there count as not recorded.

        Raises a 409 `ApiError` if the log lost the opening too and another trajectory took the id."""
        ack = await self.log.broker.publish(self.opened, {"traceparent": self.traceparent})
        if ack.duplicate:
            opening = await self.log.opening(self.id)
            if opening is None or not same_opening(opening.event, self.opened):
                raise opened_differently(self.id)
        self.log.broker.exchanges.forget(self.log.project, self.id)
        before, fresh = self.recorded, self._no_calls()
        await self._read(fresh)
        lost = before.exchanges - fresh.exchanges
        same_end = (fresh.last_stream_seq, fresh.last_at) == (before.last_stream_seq, before.last_at)
        if before.exchanges and not same_end:
            lost = max(lost, 1)  # other replicas may have recorded as many calls since
        lost = max(lost, 0)
        self.recorded = fresh
        self.rebuilt += 1
        self.add_not_recorded(lost)
        log.error(
            "the log lost the end of a trajectory; its calls were read again", trajectory=self.id, lost=lost
        )

    def add_not_recorded(self, calls: int) -> None:
        """Count calls that were answered and are not on the log."""
        self.not_recorded += calls
        self.log.not_recorded += calls

    # -- reading calls -------------------------------------------------------------------------------------------

    async def recorded_call(self, request_hash: str) -> list[ExchangeRecorded]:
        """The events of a recent complete call, one for each choice. Empty if there is none."""
        seqs = self.recorded.recent.get(request_hash, [])
        try:
            events = [(await self.log.broker.read_at(ExchangeRecorded, seq)).event for seq in seqs]
        except HistoryGoneError:
            return []
        # After a power cut, the numbers may belong to another trajectory's calls.
        ours = all(e.trajectory == self.id and e.request_hash == request_hash for e in events)
        return events if ours else []

    async def last_answer(self) -> ExchangeRecorded | None:
        """The first choice of the newest complete call, or `None`."""
        for request_hash in reversed(self.recorded.recent):
            if call := await self.recorded_call(request_hash):
                return call[0]
        return None

    async def referenced(self, reply: str, choice: int) -> ExchangeRecorded | None:
        """The complete exchange that a reference in an answer names, or `None`. The run must have been opened with
        `references`."""
        assert self.recorded.replies is not None
        seq = self.recorded.replies.get((reply, choice))
        if seq is None:
            await self.refresh()  # another replica may have answered
            assert self.recorded.replies is not None
            seq = self.recorded.replies.get((reply, choice))
        if seq is None:
            return None
        try:
            event = (await self.log.broker.read_at(ExchangeRecorded, seq)).event
        except HistoryGoneError:
            return None
        # After a power cut, the number may belong to another call.
        return (
            event if (event.trajectory, event.choice, _reply_id(event)) == (self.id, choice, reply) else None
        )


class _ReplyId(msgspec.Struct):
    id: str = ""


def _reply_id(event: ExchangeRecorded) -> str:
    return msgspec.json.decode(event.response, type=_ReplyId).id


def opened_differently(trajectory: str) -> ApiError:
    return ApiError(
        409,
        "trajectory_exists",
        f"Trajectory {trajectory!r} was opened before with other settings. Choose another id.",
    )
