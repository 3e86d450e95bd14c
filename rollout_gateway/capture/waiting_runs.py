"""Detected runs that wait for their next call, in the stream DETECTED, for all gateways together.

Each waiting run is one message, on the subject `<prefix>.<history>.<run>`: the history is a hash of all messages and
answers of the run so far, so a call that continues them finds the run by it. A gateway takes a run, to continue or to
complete it, by deleting its message. The NATS server lets only one of several deletions succeed, so any gateway can
take any run, and no two take the same one. The oldest message is the run that has waited longest. A run whose agent
started others waits once for each: these agents are its "branches".

The stream holds two kinds of hints beside the runs, which expire by themselves: what a call may quote of a waiting run
(`Quote`), and which runs have a call of a branch in flight. `detection` is the only user.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from pipeline import streams
from pipeline.log.broker import Broker, BrokerError
from pipeline.names import name_of_token, new_id, subject_token
from rollout_gateway.capture.conversations import Quote

_BRANCH = "~"
"""End of the last token of a branch's subject."""
_MOST_QUOTED = 32
"""Runs and quotes that are looked at for one fingerprint. If more runs have said the same, a call that repeats it tells
nothing about which of them it continues."""


class WaitingRun(msgspec.Struct, frozen=True, array_like=True):
    """A message of the stream: a detected run, or a branch of one, that waits for its next call."""

    run: str
    history: str
    """Hash of its messages and answers so far."""
    calls: int
    """Calls that the run has made."""
    restored: bool = False
    """Whether a gateway that started published it, because no other gateway seemed to have the run."""
    branch: bool = False
    """Whether this is a branch of the run. The run is not completed with it."""
    cut: bool = False
    """Whether the rest of the run may be recorded as another run, so that this one is not trained."""
    programs: list[str] = []
    """`CallMessages.program` of the calls so far, at most eight."""
    since: float = 0.0
    """Since when it waits, in Unix seconds of the log's server; set when the message is read, as `seq` is."""
    seq: int = 0
    """Sequence of its message."""

    @property
    def subject_end(self) -> str:
        """The last two tokens, history and run, of its subject and of the subjects of its quotes."""
        return f"{self.history}.{subject_token(self.run)}{_BRANCH if self.branch else ''}"


class Quoted(NamedTuple):
    """A quote that a call may continue, and the run that left it."""

    quote: Quote
    run: WaitingRun
    """As it waits now."""
    newest: bool
    """Whether it still waits at the answer that is quoted."""


def no_history(run: str) -> str:
    """Return a history for a run or branch without an answer. No call's messages have this history."""
    return hashlib.sha256(f"none\0{run}".encode()).hexdigest()[:32]


class WaitingRuns:
    """The detected runs of a project that wait. All but `end_branch` raise `BrokerError`."""

    def __init__(self, broker: Broker, project: str, quotes_s: float, branches_s: float) -> None:
        """`quotes_s`, `branches_s`: seconds after which quotes, and notes of branches in flight, expire."""
        self._broker, self._prefix = broker, f"{streams.DETECTED_PREFIX}.{subject_token(project)}"
        self._quotes_expire = {"Nats-TTL": f"{int(quotes_s) + 1}s"}
        self._branches_expire = {"Nats-TTL": f"{int(branches_s) + 1}s"}

    async def put(self, waiting: WaitingRun, quotes: Iterable[Quote] = ()) -> None:
        """Publish that a run waits, with `quotes` of it. If it waits with this history already, nothing changes:
        `publish_raw` writes only to an empty subject."""
        for quote in quotes:
            hint = f"{self._prefix}.quoted.{quote.fingerprint}.{waiting.subject_end}"
            await self._broker.publish_raw(hint, msgspec.msgpack.encode(quote), self._quotes_expire)
        subject = f"{self._prefix}.{waiting.subject_end}"
        # The id: a publish repeated after a lost acknowledgement must not bring back a run that was taken meanwhile.
        await self._broker.publish_raw(subject, msgspec.msgpack.encode(waiting), {}, message_id=new_id("waits"))

    async def find(self, subject_end: str) -> WaitingRun | None:
        """Return the run that waits with this `WaitingRun.subject_end`, in which history or run may be `*`; of several,
        the one that was published last; `None` if there is none."""
        return await self._get({"last_by_subj": f"{self._prefix}.{subject_end}"})

    async def oldest_after(self, seq: int) -> WaitingRun | None:
        """Return the run that waits longest of those whose message comes after sequence `seq`; `None` if there is
        none."""
        return await self._get({"seq": seq + 1, "next_by_subj": f"{self._prefix}.*.*"})

    async def _get(self, request: dict[str, Any]) -> WaitingRun | None:
        """Return the waiting run that the stream's leader finds by this `request` for a message; `None` if there is
        none. Another replica could lack the newest."""
        message = await self._broker.leader_get(streams.DETECTED.name, request)
        if message is None:
            return None
        waiting = msgspec.msgpack.decode(message.payload, type=WaitingRun)
        return msgspec.structs.replace(waiting, since=message.place.at / 1e6, seq=message.seq)

    async def take(self, waiting: WaitingRun) -> bool:
        """Delete the run's message, so that it waits no longer. Returns false if another gateway took it first."""
        return await self._broker.delete(streams.DETECTED.name, waiting.seq)

    async def run_ids(self) -> set[str]:
        """Return the ids of all runs that wait. A run whose branch alone waits is not among them."""
        tokens = {_run_token(end) for end in await self._subject_ends("*.*")}
        return {name_of_token(token) for token in tokens if not token.endswith(_BRANCH)}

    # -- hints -----------------------------------------------------------------------------------------------------

    async def find_quoted(self, fingerprint: str) -> list[Quoted]:
        """Return the quotes with this fingerprint of runs that still wait, the run that waits longest first. Returns
        none if more than `_MOST_QUOTED` runs have such a quote."""
        quoted = await self._subject_ends(f"quoted.{fingerprint}.*.*")
        run_tokens = {_run_token(end) for end in quoted}
        if not run_tokens:
            return []
        waiting = await self._subject_ends(f"*.{run_tokens.pop() if len(run_tokens) == 1 else '*'}")
        waiting_tokens = {_run_token(end) for end in waiting}
        # Quotes of runs that have had calls since and wait again. A branch's quote counts only while the branch waits.
        earlier = (end for end in quoted - waiting if not end.endswith(_BRANCH) and _run_token(end) in waiting_tokens)
        ends = [*(quoted & waiting), *earlier]
        if len({_run_token(end) for end in ends}) > _MOST_QUOTED:
            return []
        out: list[Quoted] = []
        # A run whose last messages repeat, such as one that polls, left a quote at each of its calls.
        for end in ends[:_MOST_QUOTED]:
            request = {"last_by_subj": f"{self._prefix}.quoted.{fingerprint}.{end}"}
            message = await self._broker.leader_get(streams.DETECTED.name, request)
            run = await self.find(end)
            if run is None and not end.endswith(_BRANCH):
                run = await self.find(f"*.{_run_token(end)}")
            if message is not None and run is not None:
                quote = msgspec.msgpack.decode(message.payload, type=Quote)
                out.append(Quoted(quote, run, run.subject_end == end))
        return sorted(out, key=lambda quoted: quoted.run.seq)

    async def _subject_ends(self, pattern: str) -> set[str]:
        """Return the last two tokens, history and run, of the subjects that match `pattern` after the project's
        prefix."""
        subjects = await self._broker.subjects(streams.DETECTED.name, f"{self._prefix}.{pattern}")
        return {".".join(subject.split(".")[-2:]) for subject in subjects}

    async def begin_branch(self, run: str) -> int:
        """Note that a call of a branch is in flight: meanwhile no gateway completes the run. Returns the number for
        `end_branch`."""
        subject = f"{self._prefix}.busy.{subject_token(run)}.{new_id('b')}"
        return (await self._broker.publish_raw(subject, b"", self._branches_expire)).seq

    async def end_branch(self, number: int) -> None:
        """Delete the note that `begin_branch` made; `number` is 0 if it made none. A note that can't be deleted now
        expires."""
        if number:
            with contextlib.suppress(BrokerError):
                await self._broker.delete(streams.DETECTED.name, number)

    async def has_branch(self, run: str) -> bool:
        """Whether a call of a branch is in flight at any gateway."""
        busy = f"{self._prefix}.busy.{subject_token(run)}.*"
        return bool(await self._broker.subjects(streams.DETECTED.name, busy))


def _run_token(subject_end: str) -> str:
    """Return the last token of a subject: the run's id, with `_BRANCH` at its end for a branch of the run."""
    return subject_end.partition(".")[2]
