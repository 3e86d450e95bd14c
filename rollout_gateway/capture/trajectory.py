"""One agent run in memory: its calls, recorded on the log under sequence numbers that no other gateway gives twice.

`registry` keeps the runs, and `handler` records their calls here. An "exchange" is the event of one call, or of one
choice of it; all choices have the call's number `seq`. A "stream sequence" is the number of a message on the log. An
exchange is published on the condition that the last one which this gateway knows is still the last on the log. A
gateway that is behind is refused, reads what others wrote, and takes the next free number.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from pipeline.events import Continuation, ExchangeRecorded, TrajectoryOpened
from pipeline.events.continuation import Form
from pipeline.log.broker import BrokerError, HistoryGoneError
from pipeline.telemetry.logs import get_logger
from rollout_gateway.capture.answer_ids import without_prefix
from rollout_gateway.capture.run_log import STREAM, RunLog
from rollout_gateway.http.errors import ApiError, already_completed

logger = get_logger("rollout_gateway.capture.trajectory")

_REMEMBERED_CALLS = 8
"""Newest complete calls of a run that can be answered again from the log."""
_CALL_BYTES = 1024 * 1024
"""Bytes that the calls of a run add to the log, for which one more call of the key that opened it is counted."""


def size_of(event: ExchangeRecorded) -> int:
    """Return the size of an exchange in bytes: of its texts and prompt tokens."""
    return len(event.request) + len(event.response) + len(event.prompt_ids)


@dataclass(eq=False, slots=True)
class RecordedCalls:
    """The calls of a run that are on the log."""

    exchanges: int = 0
    """Number of exchange events."""
    bytes: int = 0
    """Their size (`size_of`)."""
    next_seq: int = 0
    """Number for the next call."""
    last_stream_seq: int = 0
    """Stream sequence of the last message on the run's subject; 0 if there is none."""
    not_whole: int = 0
    """Number of further exchange events, whose tokens can't be read because what they continue is gone."""
    first_step: int = -1
    """The oldest policy step that answered; -1: none did."""
    last_step: int = -1
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cost_usd: float = 0.0
    calls_us: int = 0
    """Microseconds that the calls took, added up."""
    recent: OrderedDict[str, list[int]] = field(default_factory=OrderedDict)
    """Stream sequences of the events of the last few complete calls, by request hash, the newest last."""
    replies: dict[tuple[str, int], int] | None = None
    """Stream sequences of the complete exchanges by the reply's id and the choice, in a run whose answers carry
    references. `None` in any other run."""

    def add(self, event: ExchangeRecorded, stream_seq: int) -> None:
        """Count an exchange that was published or read. Exchanges must be added in the order of the log."""
        self.exchanges += 1
        self.bytes += size_of(event)
        self.next_seq = max(self.next_seq, event.seq + 1)
        self.last_stream_seq = stream_seq
        if event.step >= 0:  # else an outside model answered
            self.first_step = event.step if self.first_step < 0 else min(self.first_step, event.step)
            self.last_step = max(self.last_step, event.step)
        if self.replies is not None and event.status == "complete":
            self.replies[_reply_id(event), event.choice] = stream_seq
        self.cost_usd += event.cost_usd or 0.0
        self.sampled_tokens += len(event.sampled_ids) // 4
        if event.choice == 0:
            self.prompt_tokens += len(event.prompt_ids) // 4
            self.calls_us += max(event.at - event.started_at, 0) if event.started_at else 0
        if event.request_hash and event.status == "complete":
            if event.choice == 0:
                self.recent[event.request_hash] = [stream_seq]
                self.recent.move_to_end(event.request_hash)
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
    recorded: RecordedCalls = field(default_factory=RecordedCalls)
    in_flight: int = 0
    """Calls that are not answered yet or whose record is being written."""
    used_at: float = 0.0
    """Time of the last call, by `time.monotonic`."""
    completions: int = 0
    """Number of completions under way in this process: no call may begin meanwhile, as they publish `recorded`."""
    completed: bool = False
    """Whether it was completed, here or by another gateway process: no call may be recorded any more."""
    uncounted_bytes: int = 0
    """Bytes that this process added to the log and that have not counted as a call yet."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a call is recorded."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last call in flight ends, cleared when one begins."""

    def __post_init__(self) -> None:
        self.recorded.replies = {} if self.opened.references else None

    @property
    def id(self) -> str:
        return self.opened.trajectory

    # -- calls in flight -----------------------------------------------------------------------------------------

    @property
    def completing(self) -> bool:
        """Whether it is completed or about to be, and takes no further calls."""
        return self.completed or self.completions > 0

    def begin(self) -> None:
        """Count a call that begins; `end` must follow. Raises an `ApiError`: 409 if the trajectory is being completed,
        410 if it expired, 413 if its calls have `gateway.max_run_bytes`."""
        self.log.check_age(self.id, self.opened.at)
        if self.completing:
            raise already_completed(self.id, "it takes no further calls")
        if self.recorded.bytes >= self.log.max_run_bytes:
            message = (
                f"The calls of trajectory {self.id!r} hold {self.recorded.bytes:,} bytes: it takes no further ones "
                f"(gateway.max_run_bytes is {self.log.max_run_bytes:,}). Complete it, and open another."
            )
            raise ApiError(413, "run_too_large", message)
        self.used_at = time.monotonic()
        self.begin_work()

    def begin_work(self) -> None:
        """Count work that a completion has to wait for. `end` ends it."""
        self.in_flight += 1
        self.idle.clear()

    def end(self) -> None:
        """End a call, or the work that `begin_work` began."""
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()

    # -- recording -----------------------------------------------------------------------------------------------

    async def record(self, events: Sequence[ExchangeRecorded], traceparent: str = "") -> int:
        """Publish a call under the next free sequence number, and return that number. It is on the log then.

        `events`: one for each choice of the call. Their `seq` is set here. `traceparent`: W3C trace context of the
        call; empty for that of the trajectory. Safe beside other calls of the trajectory, at this gateway and at
        others. Raises `BrokerError` if the log does not take the call, and a 409 `ApiError` if another gateway
        completed the trajectory."""
        async with self.lock:
            masked = [await self.log.masks.apply(event) for event in events]
            while True:
                if self.completed:
                    raise already_completed(self.id, "this call was not recorded")
                await self.log.check_end()
                first, *others = [msgspec.structs.replace(event, seq=self.recorded.next_seq) for event in masked]
                if await self._publish(first, traceparent or self.traceparent):
                    break
            # The first choice has the number now. Another gateway that writes between two choices takes a later one.
            for event in others:
                while not await self._publish(event, traceparent or self.traceparent):
                    pass
            return first.seq

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
        if not ack.duplicate or await self._events_at([ack.seq]) == [event]:
            known.add(event, ack.seq)
            self.log.note(event, ack.seq)
            broker.exchanges.add(event, form)
            self._count_bytes(event, form)
            return True
        logger.info("another replica wrote to the trajectory", trajectory=self.id)
        before = known.next_seq, known.last_stream_seq
        await self.read_calls()
        if (known.next_seq, known.last_stream_seq) == before:
            # Nothing new was read, so `recorded` may hold messages that the log lost.
            await self.log.check_end()
            raise BrokerError(
                f"call {event.seq} of trajectory {self.id!r} can't be recorded: {STREAM} refuses it because of "
                f"message {ack.seq}, which is gone now; has the stream's retention been changed?"
            )
        return False

    def _count_bytes(self, event: ExchangeRecorded, form: Form) -> None:
        """Count what an event added to the log as calls of the key that opened the run. `form`: how it was written,
        whole or as the continuation of an earlier exchange."""
        size = size_of(event)
        saved = form.saved if isinstance(form, Continuation) else 0
        calls, self.uncounted_bytes = divmod(self.uncounted_bytes + size - saved, _CALL_BYTES)
        self.log.count_calls(self.opened.owner, calls)

    # -- keeping up with the log ---------------------------------------------------------------------------------

    async def read_calls(self) -> None:
        """Read the calls that are on the log and not in `recorded`. The caller holds `lock`, or is the only one that
        knows the trajectory."""
        into, more = self.recorded, True
        while more:
            page = await self.log.broker.read_page(
                ExchangeRecorded, into.last_stream_seq + 1, project=self.log.project, trajectory=self.id
            )
            for recorded in page.events:
                into.add(recorded.event, recorded.seq)
                self.log.note(recorded.event, recorded.seq)
            for seq in page.not_whole:
                into.not_whole += 1
                into.next_seq = max(into.next_seq, seq + 1)
            if page.last > into.last_stream_seq:
                # Undecodable messages count too: the next exchange must name the last message, whatever it is.
                into.last_stream_seq = page.last
            more = page.more

    async def refresh(self) -> None:
        """Read what other replicas recorded."""
        async with self.lock:
            await self.read_calls()

    # -- reading calls -------------------------------------------------------------------------------------------

    async def recorded_call(self, request_hash: str) -> list[ExchangeRecorded]:
        """Return the events of the newest complete call with this hash, one for each choice; none if it is no recent
        one."""
        return await self._events_at(self.recorded.recent.get(request_hash, []))

    async def _events_at(self, stream_seqs: Iterable[int]) -> list[ExchangeRecorded]:
        """Return the exchanges at these stream sequences; none if one of them is gone, another event or not whole."""
        try:
            return [(await self.log.broker.read_at(ExchangeRecorded, seq)).event for seq in stream_seqs]
        except HistoryGoneError:
            return []

    async def last_answer(self) -> ExchangeRecorded | None:
        """Return the event of the first choice of the newest complete call, or `None`."""
        for request_hash in reversed(self.recorded.recent):
            if call := await self.recorded_call(request_hash):
                return call[0]
        return None

    async def stream_seq_of(self, reply: str, choice: int) -> int | None:
        """Return the stream sequence of the complete exchange that a reference names by the id of the answer (`reply`)
        and the choice, or `None`. The run must have been opened with `references`."""
        assert self.recorded.replies is not None
        if (reply, choice) not in self.recorded.replies:
            await self.refresh()  # another replica may have answered
        return self.recorded.replies.get((reply, choice))

    async def exchange_referenced(self, reply: str, choice: int) -> ExchangeRecorded | None:
        """Return the exchange that a reference names, as `stream_seq_of` finds it, or `None`."""
        seq = await self.stream_seq_of(reply, choice)
        events = await self._events_at([seq] if seq is not None else [])
        return events[0] if events else None

    async def exchanges_of(
        self, replies: Iterable[str], count_bytes: Callable[[int], None], *, complete: bool = True
    ) -> dict[str, ExchangeRecorded]:
        """Return the exchanges whose answers have the ids `replies`, by these ids, which may have the prefix of any
        API. `complete`: only those whose answer was complete. If one of them is not a recent one, reads the whole run,
        once, and calls `count_bytes` with the size of each exchange, for which the caller's key pays."""
        missing, out = defaultdict[str, list[str]](list), dict[str, ExchangeRecorded]()
        for reply in replies:
            missing[without_prefix(reply)].append(reply)
        for request_hash in reversed(self.recorded.recent):
            call = await self.recorded_call(request_hash) if missing else []
            if call:
                out |= dict.fromkeys(missing.pop(without_prefix(_reply_id(call[0])), ()), call[0])
        if missing:
            async for event in self.log.calls(self.id):
                count_bytes(size_of(event))
                if event.status == "complete" or not complete:
                    out |= dict.fromkeys(missing.pop(without_prefix(_reply_id(event)), ()), event)
        return out


class _ReplyId(msgspec.Struct):
    id: str = ""


def _reply_id(event: ExchangeRecorded) -> str:
    """Return the id of the answer that an exchange recorded; empty if it has none."""
    return msgspec.json.decode(event.response, type=_ReplyId).id
