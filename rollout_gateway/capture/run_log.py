"""How the runs of a project were opened and completed, on the stream ROLLOUTS; and whether this stream lost its end.

`registry`, `trajectory` and `groups` publish and read here. Every read is answered by the stream's leader, so it never
misses what was acknowledged. The log's server may lose its newest messages in a power cut, and gives their numbers
again to other messages; what this process has in memory is wrong then, so it ends and starts anew."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import anyio
import msgspec

from pipeline.errors import LogShrankError
from pipeline.events import Event, ExchangeRecorded, TrajectoryCompleted, TrajectoryOpened, group_key
from pipeline.log.broker import Broker, BrokerUnavailableError, HistoryGoneError, LogEntry
from pipeline.log.fast_client import Ack
from pipeline.log.stream_reader import after_catching_up
from pipeline.log.subjects import stream_of, subject_filter
from pipeline.names import name_of_token, time_of_id
from rollout_gateway.capture.masking import Masks
from rollout_gateway.http.errors import expired_trajectory

STREAM = stream_of(ExchangeRecorded)
_END_CHECK_S = 0.5
"""How often `watch_log_end` looks whether the connection was renewed."""


class RunLog:
    """Reads and publishes events of a project's runs, and checks that the log did not lose its end."""

    def __init__(self, broker: Broker, project: str, masks: Masks | None = None) -> None:
        self.broker, self.project = broker, project
        self.masks = masks or Masks()
        self.count_calls: Callable[[str, int], None] = lambda owner, calls: None
        """Counts calls of the key named `owner` for what its runs add to the log."""
        self.max_run_bytes = sys.maxsize
        """Bytes of a run's calls, beyond which it takes no further ones."""
        self._newest: tuple[int, Event] | None = None
        """The newest event that this process published or read, with its stream sequence."""
        self._checked_reconnects = 0
        """Number of reconnections of the client when the log's end was last checked. Only a reconnection can have led
        to a server that lost something."""
        self._shrank = anyio.Event()
        """Set once the log was found to have lost its end."""

    # -- the log's end -------------------------------------------------------------------------------------------

    async def publish(self, event: Event, headers: dict[str, str]) -> Ack:
        """Publish an event of a run, if the log did not lose its end, and note it as the newest one. Raises
        `BrokerError`."""
        await self.check_end()
        ack = await self.broker.publish(event, headers)
        if not ack.duplicate:  # else the log may hold the same event of another replica, with another time
            self.note(event, ack.seq)
        return ack

    def note(self, event: Event, seq: int) -> None:
        """Note that the log holds `event` at `seq`, because it was published or read, if that is the newest event
        noted. Between a reconnection and `check_end`, which checks the newest event noted before, nothing replaces it:
        a log that lost its end may have grown past it."""
        if self._newest is None or (self._is_checked() and seq > self._newest[0]):
            self._newest = seq, event

    def _is_checked(self) -> bool:
        """Whether the log's end was checked since the last reconnection."""
        return self._checked_reconnects == int(self.broker.client.stats["reconnects"])

    async def check_end(self) -> None:
        """After a reconnection, check that the log still holds what this process knows. If it lost its end, as in
        a power cut of its machine, what is in memory is wrong: `watch_log_end` then ends the gateway.

        Raises `LogShrankError`."""
        reconnects = int(self.broker.client.stats["reconnects"])
        if self._newest is not None and not self._is_checked():
            if not await after_catching_up(partial(self._holds, *self._newest)):
                self._shrank.set()
                end = (await self.broker.stream_info(STREAM)).state.last_seq
                raise LogShrankError(
                    f"the log lost its end: {STREAM} no longer holds message {self._newest[0]}, it ends at {end}"
                )
            self._checked_reconnects = reconnects

    async def _holds(self, seq: int, event: Event) -> bool:
        """Whether message `seq` of the log is `event`, or was before retention removed it."""
        message = await self.broker.leader_get(STREAM, {"seq": seq})
        if message is None:  # retention removes messages too, but never gives their numbers again
            return int((await self.broker.stream_info(STREAM)).state.last_seq) >= seq
        recorded = await self.broker.recorded(STREAM, message)
        return message.subject == event.subject() and (recorded is None or recorded.event.at == event.at)

    async def watch_log_end(self) -> None:
        """Call `check_end`, which checks only after a reconnection, every `_END_CHECK_S` seconds, for ever. Raises
        `LogShrankError`, which ends the gateway, once a check of this task or of a call found that the log lost its end
        (`_shrank`). `service` starts it."""
        while not self._shrank.is_set():
            with anyio.move_on_after(_END_CHECK_S):
                await self._shrank.wait()
            with contextlib.suppress(BrokerUnavailableError):
                await self.check_end()
        raise LogShrankError("the log lost its end: the gateway ends, and reads it anew at its next start")

    # -- expiry --------------------------------------------------------------------------------------------------

    def check_age(self, trajectory: str, opened_at: int = 0) -> None:
        """Raise a 410 `ApiError` if the trajectory was opened longer ago than the log keeps its events, by `opened_at`
        (Unix microseconds) or, if that is 0, by the date in its id."""
        config = self.broker.config
        since = opened_at / 1e6 or time_of_id(trajectory)
        if since and time.time() - since > config.rollouts_max_age_s:
            raise expired_trajectory(trajectory, config.rollouts_max_age_h)

    async def check_id_is_new(self, opened: TrajectoryOpened) -> None:
        """Raise a 410 `ApiError` if a trajectory that is about to be opened has the id of an expired one of which the
        log still holds calls or a completion: the new trajectory would be taken to have them."""
        self.check_age(opened.trajectory)
        try:
            keys = {"project": self.project, "trajectory": opened.trajectory}
            has_calls = await self.broker.read_last(ExchangeRecorded, **keys) is not None
        except HistoryGoneError:
            has_calls = True  # the newest one continues an exchange that has expired
        if not has_calls and await self.completion(opened) is None:
            return
        if await self.opening(opened.trajectory) is None:
            raise expired_trajectory(opened.trajectory, self.broker.config.rollouts_max_age_h)

    # -- reading -------------------------------------------------------------------------------------------------

    async def opening(self, trajectory: str) -> LogEntry[TrajectoryOpened] | None:
        """Return the event that opened a trajectory; `None` if it was never opened."""
        return await self.broker.read_last(TrajectoryOpened, project=self.project, trajectory=trajectory)

    async def completion(self, opened: TrajectoryOpened) -> TrajectoryCompleted | None:
        """Return the event that completed a trajectory; `None` if it is open."""
        recorded = await self.broker.read_last(
            TrajectoryCompleted,
            project=self.project,
            model=opened.model,
            trajectory=opened.trajectory,
            group_key=group_key(opened.group, opened.trajectory),
        )
        return recorded.event if recorded is not None else None

    async def calls(self, trajectory: str) -> AsyncIterator[ExchangeRecorded]:
        """Yield all exchanges of a trajectory, in the order of the log. They are not in memory together, as agents may
        make as many large calls as they like."""
        last, more = 0, True
        while more:
            events, last, more, _ = await self.broker.read_page(
                ExchangeRecorded, last + 1, project=self.project, trajectory=trajectory
            )
            for recorded in events:
                yield recorded.event

    async def unfinished(self, prefix: str) -> list[str]:
        """Return the ids of the open trajectories whose id begins with `prefix`. Reads all subjects of the project."""
        ids: list[set[str]] = []
        for event in (TrajectoryOpened, TrajectoryCompleted):
            subjects = await self.broker.subjects(STREAM, subject_filter(event, project=self.project))
            tokens = (subject.rpartition(".")[2] for subject in subjects)
            ids.append({name_of_token(token) for token in tokens if token.startswith(prefix)})
        opened, completed = ids
        return sorted(opened - completed)


def same_opening(a: TrajectoryOpened, b: TrajectoryOpened) -> bool:
    """Whether two openings agree in everything but their times, so that one may be a client's retry of the other. A
    decision between them may have changed who answers."""
    first, second = (msgspec.structs.replace(opened.as_asked(), at=0, paced_s=0) for opened in (a, b))
    return first == second
