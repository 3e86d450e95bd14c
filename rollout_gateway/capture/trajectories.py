"""Agent runs: open, record, complete; kept in memory for speed and rebuilt from the log wherever they are not.

Any gateway replica can serve any trajectory at any time. Two things make that safe. An exchange is published on the
condition that the last one this replica knows of is still the last in the log, so a stale replica notices, reads again
and takes the next free sequence number. And a completion's subject is unique, so of two completions one wins.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing

import msgspec

from pipeline.errors import OtherEventError, UndecodableError
from pipeline.events import ExchangeRecorded, TrajectoryCompleted, TrajectoryOpened
from pipeline.log.broker import Broker, BrokerError, HistoryGoneError
from pipeline.log.follow import follow_messages
from pipeline.log.subjects import stream_of
from pipeline.names import name_of_token
from pipeline.telemetry import spans
from pipeline.telemetry.logs import get_logger
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.runs import Runs, Trajectory, same_opening
from rollout_gateway.http.errors import ApiError, already_completed, unknown_trajectory

log = get_logger("rollout_gateway.capture.trajectories")

_STREAM = stream_of(TrajectoryCompleted)
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_SETTLE_S = 30.0
NOT_RECORDED = "exchanges_not_recorded"
"""Metric of a completed trajectory: calls that were answered and are not on the log."""


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


class Registry(Runs):
    """The trajectories that this replica knows; the others are read from the log."""

    def __init__(
        self, broker: Broker, project: str, tokens: TrajectoryTokens, *, keep: int = 100_000
    ) -> None:
        super().__init__(broker, project)
        self.tokens, self._keep = tokens, keep
        self._known: dict[str, Trajectory] = {}
        self._loading: dict[str, asyncio.Task[Trajectory]] = {}
        self._heeded = 1
        self.not_recorded = 0
        """Calls that were answered and are not on the log, of all runs; see `Trajectory.not_recorded`."""

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
        return recorded.event if recorded is not None else None

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
        exchanges = await self._broker.count(ExchangeRecorded, project=self.project, trajectory=trajectory)
        return opened, None, exchanges

    async def refresh(self, found: Trajectory) -> bool:
        """Take in what other replicas recorded; whether there was anything."""
        async with found.lock:
            before = found.exchanges, found.next_seq, found.rebuilt
            await self._read_exchanges(found)
            await self._keep_up(found)
            return (found.exchanges, found.next_seq, found.rebuilt) != before

    async def begin(self) -> None:
        """Note where the log stands: `heed_completions` tells of what is completed from now on."""
        self._heeded = (await self._broker.stream_info(_STREAM)).state.last_seq + 1

    async def heed_completions(self) -> None:
        """For ever: forget trajectories that other replicas complete, so that their calls are refused here too.

        The log is followed, so a completion is heeded also where this replica was cut off as it came."""
        completions = follow_messages(
            self._broker, [TrajectoryCompleted], lambda: self._heeded, project=self.project
        )
        async with aclosing(completions) as messages:
            async for raw in messages:
                found = self._known.pop(name_of_token(raw.subject.rpartition(".")[2]), None)
                if found is not None:
                    found.completing = True

    # -- changing ------------------------------------------------------------------------------------------------

    async def open(self, event: TrajectoryOpened, traceparent: str) -> Trajectory:
        """Open a trajectory; the same again (a retry) is answered alike, another of that name is a 409 `ApiError`."""
        traceparent = traceparent or spans.traceparent(self.project, event.trajectory)
        life = self._life()
        ack = await self._broker.publish(event, {"traceparent": traceparent})
        if not ack.duplicate:
            return self._remember(Trajectory(event, traceparent, life=life))
        found = self._known.get(event.trajectory) or await self._begun(event.trajectory)
        if found is None or not same_opening(found.opened, event):
            raise _opened_differently(event.trajectory)
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
                await self._keep_up(found)
                events, rebuilt = make(found.next_seq), found.rebuilt
                if not await self._publish(found, events[0], traceparent):
                    continue
                for event in events[1:]:
                    # The number is ours: another replica that comes between two choices has taken a later one.
                    while not (done := await self._publish(found, event, traceparent)):
                        if found.rebuilt != rebuilt:
                            break  # the log lost the first choice, so the number may be another call's
                    if not done:
                        break
                else:
                    return events[0].seq

    async def _publish(self, found: Trajectory, event: ExchangeRecorded, traceparent: str) -> bool:
        """False where the log did not take it at what is known of the run; what there is on the log is taken in then, so that
        another try begins elsewhere. Raises `BrokerError` where there is nothing to take in."""
        headers = {"traceparent": traceparent or found.traceparent, _EXPECTED: str(found.last_stream_seq)}
        ack = await self._broker.publish(event, headers)
        recorded = not ack.duplicate or await self._is_at(event, ack.seq)
        if await self._keep_up(found):
            return recorded
        if recorded:
            found.note(event, ack.seq)
            return True
        log.info("another replica wrote to the trajectory", trajectory=found.id)
        before = found.next_seq, found.last_stream_seq
        await self._read_exchanges(found)
        if (found.next_seq, found.last_stream_seq) == before:
            await self._rebuild(found)  # what is known here is ahead of the log
            if (found.next_seq, found.last_stream_seq) == before:
                raise BrokerError(
                    f"call {event.seq} of trajectory {found.id!r} can't be recorded: its message id {event.message_id()!r} "
                    f"belongs to message {ack.seq} of {_STREAM}, which is not a call of this trajectory"
                )
        return False

    async def _keep_up(self, found: Trajectory) -> bool:
        """Read a run anew if the server came back without the end of its log, as after a power cut; whether it did."""
        life = self._life()
        if found.life == life:
            return False
        lost = await self._lost(found)
        if lost:
            await self._rebuild(found)
        found.life = life
        return lost

    async def _rebuild(self, found: Trajectory) -> None:
        """Make a run what the log holds of it. Calls that were answered and are not there count as not recorded.

        Raises a 409 `ApiError` where the log lost the run's opening too and another run has its name by now."""
        ack = await self._broker.publish(found.opened, {"traceparent": found.traceparent})
        if ack.duplicate:
            there = await self._begun(found.id)
            if there is None or not same_opening(there.opened, found.opened):
                raise _opened_differently(found.id)
        fresh = Trajectory(found.opened, found.traceparent)
        await self._read_exchanges(fresh)
        lost = found.exchanges - fresh.exchanges
        if found.exchanges and (fresh.last_stream_seq, fresh.last_at) != (
            found.last_stream_seq,
            found.last_at,
        ):
            lost = max(lost, 1)  # other replicas may have recorded as many since
        found.become(fresh)
        found.not_recorded += max(lost, 0)
        self.not_recorded += max(lost, 0)
        log.error("the log lost the end of a run: it was read anew", trajectory=found.id, calls=max(lost, 0))

    async def _is_at(self, event: ExchangeRecorded, stream_seq: int) -> bool:
        """Whether it is this event that the log holds there. One that retention took was ours: its message id said so."""
        try:
            return (await self._broker.read_at(ExchangeRecorded, stream_seq)).event == event
        except OtherEventError:
            return False
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
            await self.refresh(found)  # what other replicas recorded
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


def _opened_differently(trajectory: str) -> ApiError:
    return ApiError(
        409,
        f"Trajectory {trajectory!r} was opened before, and differently.",
        kind="conflict_error",
        code="trajectory_exists",
    )


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
