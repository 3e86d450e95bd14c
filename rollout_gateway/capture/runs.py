"""Agent runs as the log holds them: how they began and ended, their calls, and whether the log still holds what is known.

Every read is by the log's leader or checked against it, so that any gateway replica can serve any run.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from pipeline.events import ExchangeRecorded, TrajectoryCompleted, TrajectoryOpened
from pipeline.log.broker import Broker, HistoryGoneError, Recorded
from pipeline.log.messages import Page
from pipeline.log.subjects import stream_of, subject_filter
from pipeline.names import name_of_token
from rollout_gateway.http.errors import already_completed

_STREAM = stream_of(ExchangeRecorded)
_REMEMBERED_CALLS = 8


@dataclass(eq=False, slots=True)
class Trajectory:
    """What must be known of a run while it goes on."""

    opened: TrajectoryOpened
    traceparent: str
    next_seq: int = 0
    exchanges: int = 0
    """Exchange events in the log."""
    last_stream_seq: int = 0
    """Stream sequence of the last message read on their subject; 0 where there is none."""
    last_at: int = 0
    """`at` of the exchange that lies there; 0 where none does."""
    first_step: int = -1
    last_step: int = -1
    recent: OrderedDict[str, list[int]] = field(default_factory=OrderedDict)
    """Request hash to the stream sequences of its exchange events, of the last few calls."""
    in_flight: int = 0
    """Calls that are not answered yet, and those whose exchange is being recorded."""
    not_recorded: int = 0
    """Calls that were answered and are not on the log: it did not take them, with `gateway.capture = "async"`, or it lost them
    in a power cut."""
    life: int = 0
    """How often the connection had been made anew when the log was last seen to hold all that is known here."""
    rebuilt: int = 0
    """How often it was read anew because the log no longer held what was known here."""
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
        self.last_stream_seq, self.last_at = stream_seq, event.at
        self.first_step = event.step if self.first_step < 0 else min(self.first_step, event.step)
        self.last_step = max(self.last_step, event.step)
        if event.request_hash and event.status == "complete":
            if event.choice == 0:
                self.recent[event.request_hash] = [stream_seq]
                if len(self.recent) > _REMEMBERED_CALLS:
                    self.recent.popitem(last=False)
            elif event.request_hash in self.recent:
                self.recent[event.request_hash].append(stream_seq)

    def become(self, fresh: Trajectory) -> None:
        """Know of the exchanges what `fresh` knows, which was read from the log."""
        self.next_seq, self.exchanges, self.recent = fresh.next_seq, fresh.exchanges, fresh.recent
        self.last_stream_seq, self.last_at = fresh.last_stream_seq, fresh.last_at
        self.first_step, self.last_step = fresh.first_step, fresh.last_step
        self.rebuilt += 1


class Runs:
    """The runs of a project, read from the log."""

    def __init__(self, broker: Broker, project: str) -> None:
        self._broker, self.project = broker, project

    async def _opening(self, trajectory: str) -> Recorded[TrajectoryOpened] | None:
        return await self._broker.read_last(TrajectoryOpened, project=self.project, trajectory=trajectory)

    async def _begun(self, trajectory: str) -> Trajectory | None:
        """From the log, without its calls; `None` where it was never opened."""
        life = self._life()
        opened = await self._opening(trajectory)
        if opened is None:
            return None
        return Trajectory(opened.event, opened.headers.get("traceparent", ""), life=life)

    async def _read_exchanges(self, found: Trajectory) -> None:
        more = True
        while more:
            page = await self._exchange_page(found, found.last_stream_seq)
            for recorded in page.events:
                found.note(recorded.event, recorded.seq)
            if page.last > found.last_stream_seq:
                # Past what could not be decoded too: the next exchange is published behind it.
                found.last_stream_seq, found.last_at = page.last, 0
            more = page.more

    async def _exchange_page(self, found: Trajectory, after: int) -> Page[ExchangeRecorded]:
        return await self._broker.read_page(
            ExchangeRecorded, after + 1, project=self.project, trajectory=found.id
        )

    def _life(self) -> int:
        """How often the connection was made anew."""
        return int(self._broker.client.stats["reconnects"])

    async def _lost(self, found: Trajectory) -> bool:
        """Whether the log no longer holds what is known of a run, as after a power cut that took its end."""
        if not found.last_stream_seq:
            begun = await self._begun(found.id)
            return begun is None or not same_opening(begun.opened, found.opened)
        raw = await self._broker.leader_get(_STREAM, {"seq": found.last_stream_seq})
        if raw is None:  # retention takes messages too, but not their numbers
            info = await self._broker.stream_info(_STREAM)
            return int(info.state.last_seq) < found.last_stream_seq
        if raw.subject != subject_filter(ExchangeRecorded, project=self.project, trajectory=found.id):
            return True
        recorded = await self._broker.recorded(_STREAM, raw)
        at = recorded.event.at if recorded is not None else 0
        return bool(found.last_at) and at != found.last_at

    async def completion(self, opened: TrajectoryOpened) -> TrajectoryCompleted | None:
        last = await self._broker.read_last(
            TrajectoryCompleted, project=self.project, model=opened.model, trajectory=opened.trajectory
        )
        return last.event if last is not None else None

    async def last_answer(self, found: Trajectory) -> ExchangeRecorded | None:
        """The newest complete exchange of an open trajectory; its first choice, where it has several."""
        for request_hash in reversed(found.recent):
            if call := await self.recorded_call(found, request_hash):
                return call[0]
        return None

    async def unfinished(self, prefix: str) -> list[str]:
        """Names, of those that begin with `prefix`, that the log holds opened and not completed. Reads all subjects."""
        names: list[set[str]] = []
        for event in (TrajectoryOpened, TrajectoryCompleted):
            subjects = await self._broker.subjects(
                stream_of(event), subject_filter(event, project=self.project)
            )
            tokens = (subject.rpartition(".")[2] for subject in subjects)
            names.append({name_of_token(t) for t in tokens if t.startswith(prefix)})
        opened, completed = names
        return sorted(opened - completed)

    async def exchange_of(self, found: Trajectory, reply: str) -> ExchangeRecorded | None:
        """The complete exchange whose reply has the id `reply`, or `None`. The newest are looked at first."""
        for request_hash in reversed(found.recent):
            call = await self.recorded_call(found, request_hash)
            if call and _reply_id(call[0]) == reply:
                return call[0]
        last, more = 0, True
        while more:
            page = await self._exchange_page(found, last)
            last, more = page.last, page.more
            for recorded in page.events:
                event = recorded.event
                if event.status == "complete" and _reply_id(event) == reply:
                    return event
        return None

    async def recorded_call(self, found: Trajectory, request_hash: str) -> list[ExchangeRecorded]:
        """The exchange events (one a choice) of a recent call; empty where there is none."""
        seqs = found.recent.get(request_hash, [])
        try:
            events = [(await self._broker.read_at(ExchangeRecorded, seq)).event for seq in seqs]
        except HistoryGoneError:
            return []
        # After a power cut another run's call may lie under a number: then this call is not recorded any more.
        ours = all(e.trajectory == found.id and e.request_hash == request_hash for e in events)
        return events if ours else []


class _Reply(msgspec.Struct):
    id: str = ""


def _reply_id(event: ExchangeRecorded) -> str:
    return msgspec.json.decode(event.response, type=_Reply).id


def same_opening(a: TrajectoryOpened, b: TrajectoryOpened) -> bool:
    """Whether two openings say the same, so that one may be a client's retry of the other."""
    return msgspec.structs.replace(a, at=0, paced_s=0) == msgspec.structs.replace(b, at=0, paced_s=0)
