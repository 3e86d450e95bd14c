"""Detected runs that wait for their next call, in stream DETECTED. Each is one message, on a subject with the hash of
all messages and answers of the run so far.

A gateway takes a run, to continue or to complete it, by deleting its message. The NATS server lets only one of several
deletions succeed, so any gateway can take any run and no two gateways take the same one. The oldest message is the run
that has waited longest. A run whose agent started others waits once for each: the agents are its branches.

The stream holds two kinds of hints beside them, which expire by themselves: what a call may quote of a waiting run
(`Quote`), and which runs have a call of a branch in flight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from pipeline import streams
from pipeline.log.broker import Broker
from pipeline.log.messages import StoredMessage
from pipeline.names import name_of_token, new_id, subject_token
from rollout_gateway.capture.conversations import Quote

_BRANCH = "~"
"""End of the last token of a branch's subject."""
_MOST_QUOTED = 32
"""Runs and quotes that are looked at for one fingerprint. What more runs have said tells none of them."""


class WaitingRun(msgspec.Struct, frozen=True, array_like=True):
    """A detected run, or a branch of one, that waits for its next call: what its message holds."""

    run: str
    history: str
    """Hash of its messages."""
    calls: int
    """Calls that the run has made."""
    restored: bool = False
    """A gateway that started put it there, because no other seemed to have it."""
    branch: bool = False
    """An agent that the run's agent started. The run does not end with it."""
    cut: bool = False
    """Its rest may be in another run."""
    programs: list[str] = []
    """`CallMessages.program` of the calls so far, at most eight."""
    since: float = 0.0
    """Since when it waits, in Unix seconds of the log's server; set when the message is read, as `seq` is."""
    seq: int = 0
    """Sequence of its message."""

    @property
    def place(self) -> str:
        """Where it waits: its subject after the project's prefix."""
        return f"{self.history}.{subject_token(self.run)}{_BRANCH if self.branch else ''}"


def no_history(run: str) -> str:
    """The history of a run without an answer: no call continues it."""
    return hashlib.sha256(f"none\0{run}".encode()).hexdigest()[:32]


class WaitingRuns:
    """The detected runs of a project that wait. All raise `BrokerError`."""

    def __init__(self, broker: Broker, project: str, quotes_s: float, branches_s: float) -> None:
        """`quotes_s`, `branches_s`: seconds after which quotes, and notes of branches in flight, expire."""
        self._broker, self._prefix = broker, f"{streams.DETECTED_PREFIX}.{subject_token(project)}"
        self._quotes_expire = {"Nats-TTL": f"{int(quotes_s) + 1}s"}
        self._branches_expire = {"Nats-TTL": f"{int(branches_s) + 1}s"}

    async def put(self, waiting: WaitingRun, quotes: Iterable[Quote] = ()) -> None:
        """Have a run wait, with what calls may quote of it. It waits once, if it waits there already."""
        for quote in quotes:
            hint = f"{self._prefix}.quoted.{quote.fingerprint}.{waiting.place}"
            await self._broker.publish_raw(hint, msgspec.msgpack.encode(quote), self._quotes_expire)
        subject = f"{self._prefix}.{waiting.place}"
        await self._broker.publish_raw(subject, msgspec.msgpack.encode(waiting), {}, message_id=new_id("waits"))

    async def find(self, which: str) -> WaitingRun | None:
        """The run that waits under `which`, a history or a `WaitingRun.place`; of several, the one that came last. The
        history in a place may be `*`."""
        subject = f"{self._prefix}.{which}" + ("" if "." in which else ".*")
        message = await self._broker.leader_get(streams.DETECTED.name, {"last_by_subj": subject})
        return _read(message) if message is not None else None

    async def claim(self, waiting: WaitingRun) -> bool:
        """Take this run. Returns whether it still waited."""
        return await self._broker.delete(streams.DETECTED.name, waiting.seq)

    async def next(self, after: int) -> WaitingRun | None:
        """The run that waits longest of those whose message comes after sequence `after`."""
        request = {"seq": after + 1, "next_by_subj": f"{self._prefix}.*.*"}
        message = await self._broker.leader_get(streams.DETECTED.name, request)
        return _read(message) if message is not None else None

    async def names(self) -> set[str]:
        """Ids of all runs that wait, other than with a branch."""
        tokens = {_run_token(place) for place in await self._places("*.*")}
        return {name_of_token(token) for token in tokens if not token.endswith(_BRANCH)}

    # -- hints -----------------------------------------------------------------------------------------------------

    async def quoted(self, fingerprint: str) -> list[tuple[Quote, WaitingRun, bool]]:
        """Find the runs that a call with this fingerprint may continue although its messages differ from theirs.

        For each quote: the quote, its run as it waits now, and whether the run still waits at the answer that is
        quoted; the run that waits longest comes first. Runs that no longer wait are left out. Of a branch, only the
        same place counts."""
        quoted = await self._places(f"quoted.{fingerprint}.*.*")
        run_tokens = {_run_token(place) for place in quoted}
        if not run_tokens:
            return []
        waits = await self._places(f"*.{run_tokens.pop() if len(run_tokens) == 1 else '*'}")
        waiting_tokens = {_run_token(place) for place in waits}
        # Another branch of the run may be anywhere else.
        earlier = (p for p in quoted - waits if not p.endswith(_BRANCH) and _run_token(p) in waiting_tokens)
        places = [*(quoted & waits), *earlier]
        if len({_run_token(place) for place in places}) > _MOST_QUOTED:
            return []
        out: list[tuple[Quote, WaitingRun, bool]] = []
        # A run whose last messages repeat, such as one that polls, left a quote at each of its calls.
        for place in places[:_MOST_QUOTED]:
            request = {"last_by_subj": f"{self._prefix}.quoted.{fingerprint}.{place}"}
            message = await self._broker.leader_get(streams.DETECTED.name, request)
            waiting = await self.find(place)
            if waiting is None and not place.endswith(_BRANCH):
                waiting = await self.find(f"*.{_run_token(place)}")
            if message is not None and waiting is not None:
                quote = msgspec.msgpack.decode(message.payload, type=Quote)
                out.append((quote, waiting, waiting.place == place))
        return sorted(out, key=lambda found: found[1].seq)

    async def _places(self, pattern: str) -> set[str]:
        """`WaitingRun.place` of the messages whose subject after the project's prefix matches."""
        subjects = await self._broker.subjects(streams.DETECTED.name, f"{self._prefix}.{pattern}")
        return {".".join(subject.split(".")[-2:]) for subject in subjects}

    async def begin_branch(self, run: str) -> int:
        """Note that a call of a branch is in flight. Returns the number for `end_branch`."""
        subject = f"{self._prefix}.busy.{subject_token(run)}.{new_id('b')}"
        return (await self._broker.publish_raw(subject, b"", self._branches_expire)).seq

    async def end_branch(self, number: int) -> None:
        await self._broker.delete(streams.DETECTED.name, number)

    async def has_branch(self, run: str) -> bool:
        """Whether a call of a branch is in flight at any gateway."""
        busy = f"{self._prefix}.busy.{subject_token(run)}.*"
        return bool(await self._broker.subjects(streams.DETECTED.name, busy))


def _run_token(place: str) -> str:
    """The part of a `WaitingRun.place` that names the run or branch."""
    return place.partition(".")[2]


def _read(message: StoredMessage) -> WaitingRun:
    waiting = msgspec.msgpack.decode(message.payload, type=WaitingRun)
    return msgspec.structs.replace(waiting, since=message.place.at / 1e6, seq=message.seq)
