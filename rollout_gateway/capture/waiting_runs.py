"""Detected runs that wait for their next call, in stream DETECTED. Each is one message, on a subject with the hash of
all messages and answers of the run so far.

A gateway takes a run, to continue or to complete it, by deleting its message. The NATS server lets only one of several
deletions succeed, so any gateway can take any run and no two gateways take the same one. The oldest message is the run
that has waited longest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from pipeline import streams
from pipeline.log.broker import Broker
from pipeline.log.messages import StoredMessage
from pipeline.names import name_of_token, new_id, subject_token


class _State(msgspec.Struct, array_like=True):
    calls: int
    restored: bool


@dataclass(frozen=True)
class WaitingRun:
    """A detected run that waits for its next call."""

    run: str
    history: str
    """Hash of its messages."""
    calls: int
    """Calls that the run has made."""
    restored: bool = False
    """A gateway that started put it there, because no other seemed to have it."""
    since: float = 0.0
    """Since when it waits, in Unix seconds of the log's server."""
    seq: int = 0
    """Sequence of its message."""


def no_history(run: str) -> str:
    """The history of a run without an answer: no call continues it."""
    return hashlib.sha256(f"none\0{run}".encode()).hexdigest()[:32]


class WaitingRuns:
    """The detected runs of a project that wait. All raise `BrokerError`."""

    def __init__(self, broker: Broker, project: str) -> None:
        self._broker, self._prefix = broker, f"{streams.DETECTED_PREFIX}.{subject_token(project)}"

    async def put(self, waiting: WaitingRun) -> None:
        """Have a run wait. It waits once, if it waits there already."""
        subject = f"{self._prefix}.{waiting.history}.{subject_token(waiting.run)}"
        state = msgspec.msgpack.encode(_State(waiting.calls, waiting.restored))
        await self._broker.publish_raw(subject, state, {}, message_id=new_id("waits"))

    async def take(self, history: str) -> WaitingRun | None:
        """Take a run that waits with this history, the one that came last. `None` if there is none."""
        while True:
            request = {"last_by_subj": f"{self._prefix}.{history}.*"}
            message = await self._broker.leader_get(streams.DETECTED.name, request)
            if message is None:
                return None
            waiting = _read(message)
            if await self.claim(waiting):
                return waiting

    async def claim(self, waiting: WaitingRun) -> bool:
        """Take this run. Returns whether it still waited."""
        return await self._broker.delete(streams.DETECTED.name, waiting.seq)

    async def next(self, after: int) -> WaitingRun | None:
        """The run that waits longest of those whose message comes after sequence `after`."""
        request = {"seq": after + 1, "next_by_subj": f"{self._prefix}.>"}
        message = await self._broker.leader_get(streams.DETECTED.name, request)
        return _read(message) if message is not None else None

    async def names(self) -> set[str]:
        """Ids of all runs that wait."""
        subjects = await self._broker.subjects(streams.DETECTED.name, f"{self._prefix}.>")
        return {name_of_token(subject.rpartition(".")[2]) for subject in subjects}


def _read(message: StoredMessage) -> WaitingRun:
    _, history, run = message.subject.rsplit(".", 2)
    state = msgspec.msgpack.decode(message.payload, type=_State)
    since = message.place.at / 1e6
    return WaitingRun(name_of_token(run), history, state.calls, state.restored, since, message.seq)
