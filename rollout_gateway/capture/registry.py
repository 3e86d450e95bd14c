"""The trajectories ("runs") that this gateway process knows: found, opened and completed.

`identity` finds the run of each call here, and the routes of `api` open and complete runs. Any gateway can serve any
run at any time: one that is not in memory is read from the log (`run_log`). The completions of a run have one subject,
of which the log keeps one message, so of two completions one succeeds.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Annotated, Any

import msgspec

from pipeline.events import ExchangeRecorded, Outcome, TrainingBatch, TrajectoryCompleted, TrajectoryOpened
from pipeline.events.rollout import TrajectoryEvent
from pipeline.events.types import Number
from pipeline.log.broker import Broker
from pipeline.log.follow import follow_messages
from pipeline.names import name_of_token
from pipeline.tracing import trace
from rollout_gateway.access.api_keys import Access
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.answer_ids import trajectory_of
from rollout_gateway.capture.copies import Reference, copy_calls, no_such_call
from rollout_gateway.capture.groups import Groups
from rollout_gateway.capture.masking import Masks
from rollout_gateway.capture.run_log import STREAM, RunLog, same_opening
from rollout_gateway.capture.trajectory import Trajectory
from rollout_gateway.http.errors import ApiError, already_completed, unknown_trajectory
from rollout_gateway.serving.pacing import Pacing

_OWNER_BYTES = 64 * 1024 * 1024
"""Bytes that the runs of one key take in memory, by their openings."""
_SETTLE_S = 30.0
"""How long a completion waits for the calls that are in flight."""
DETECTED = "i"
"""Prefix of the ids of runs that the gateway detected. A gateway that starts reads the open ones."""
NOT_RECORDED = "exchanges_not_recorded"
"""Metric of a completed trajectory: calls that can't be read from the log, because what they continue is gone."""
Numbers = Annotated[dict[str, Number], msgspec.Meta(max_length=256)]
"""Rewards or metrics by name."""
Rates = Annotated[list[float], msgspec.Meta(max_length=4096)]
"""Learning rates, one for each update of a step."""


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Groups to be trained together, in one step of their own. The batch belongs to the key that requests it."""

    id: str
    groups: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=4096)]
    """The groups of the batch. The step begins when each of them is scored or discarded."""
    settings: Annotated[dict[str, bool | int | float | str | Rates | None], msgspec.Meta(max_length=32)] = {}
    """Settings of the step by their names below `trainer`, such as `loss.type`. They take an operator's key, and the
    installation says which it permits (`trainer.batch_settings`)."""

    def of_owner(self, owner: str) -> TrainingBatch:
        """Return the batch as its completions record it, for the key named `owner`."""
        settings = msgspec.json.encode(self.settings, order="sorted")
        return TrainingBatch(id=self.id, groups=self.groups, settings=settings, owner=owner)


class Completion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/trajectories/{trajectory}/complete`: the results of a run (docs/gateway.md has the fields)."""

    reward: float | None = None
    rewards: Numbers = {}
    metrics: Numbers = {}
    metadata: dict[str, Any] = {}
    outcome: Outcome = "scored"
    exchanges: tuple[Reference, ...] = ()
    """Calls of other trajectories that make up this one, in this order. Empty: its own calls."""
    batch: BatchRequest | None = None


class Registry:
    """The open trajectories of a project that are in this replica's memory."""

    def __init__(
        self,
        broker: Broker,
        project: str,
        tokens: TrajectoryTokens,
        pacing: Pacing | None = None,
        *,
        masks: Masks | None = None,
    ) -> None:
        """`pacing` admits new groups; `None`: all are admitted. `masks`: none by default."""
        self.pacing = pacing
        self.log = RunLog(broker, project, masks)
        self.groups = Groups(self.log)
        self.project, self.tokens = project, tokens
        self.assign: Callable[[TrajectoryOpened], TrajectoryOpened] = lambda opened: opened
        """Decides who answers a run that is about to be opened (`VersionRouter.assign`)."""
        self._known: dict[str, Trajectory] = {}
        self._bytes: Counter[str] = Counter()
        """Bytes of the openings in memory, by the key that opened them."""
        self._loading: dict[str, asyncio.Task[Trajectory]] = {}
        """Trajectories that are being read from the log: simultaneous calls of one wait for the same task."""
        self._followed_from = 1
        """Stream sequence from which `follow_completions` reads."""

    def __len__(self) -> int:
        return len(self._known)

    # -- finding -------------------------------------------------------------------------------------------------

    def get(self, trajectory: str) -> Trajectory | None:
        """Return an open trajectory that is in memory, or `None`."""
        return self._known.get(trajectory)

    async def find(self, trajectory: str) -> Trajectory:
        """Return an open trajectory, from memory or the log. Raises an `ApiError`: 404 if it is unknown, 409 if it is
        completed, 410 if it expired."""
        if run := self._known.get(trajectory):
            return run
        self.log.check_age(trajectory)
        task = self._loading.get(trajectory)
        if task is None:
            task = self._loading[trajectory] = asyncio.ensure_future(self._load(trajectory))
            task.add_done_callback(lambda _: self._loading.pop(trajectory, None))
        return await asyncio.shield(task)

    async def find_to_read(self, trajectory: str) -> Trajectory:
        """Return an open or completed trajectory, to read its opening and recorded calls, not to add calls. One that is
        not in memory has no recorded calls before its `refresh`. Raises a 404 `ApiError`."""
        run = await self._find_opened(trajectory)
        if run is None:
            raise unknown_trajectory(trajectory)
        return run

    async def opening(self, trajectory: str) -> TrajectoryOpened | None:
        """Return the event that opened an open or completed trajectory, or `None`. Reads at most one event."""
        run = await self._find_opened(trajectory)
        return run.opened if run is not None else None

    async def opening_for(self, trajectory: str, access: Access) -> TrajectoryOpened:
        """Return the event that opened a trajectory which the caller's key may use. `access` is not that of a run's
        token, which has no owner. Raises a 404 `ApiError`."""
        opened = await self.opening(trajectory)
        if opened is None or not access.owns(opened.owner):
            raise unknown_trajectory(trajectory)
        return opened

    async def exchanges_of(
        self, answers: Iterable[str], access: Access, count_bytes: Callable[[int], None]
    ) -> dict[str, ExchangeRecorded]:
        """Return the complete exchanges of answers, by the answers' ids. `count_bytes`: as for
        `Trajectory.exchanges_of`. Left out are those that the log does not hold, and those of runs that the caller may
        not use. Each run is read once at most, and none after one that lacks an answer: a request that names thousands
        of runs costs no more than its first wrong one."""
        of_run: defaultdict[str, list[str]] = defaultdict(list)
        for answer in answers:
            trajectory = trajectory_of(answer)
            if trajectory is not None and access.trajectory in ("", trajectory):
                of_run[trajectory].append(answer)
        out: dict[str, ExchangeRecorded] = {}
        for trajectory, wanted in of_run.items():
            run = await self._find_opened(trajectory)
            if run is not None and (access.trajectory or access.owns(run.opened.owner)):
                out |= await run.exchanges_of(wanted, count_bytes)
            if not out.keys() >= set(wanted):
                break
        return out

    async def describe(self, trajectory: str) -> tuple[TrajectoryOpened, TrajectoryCompleted | None, int]:
        """Return the event that opened a trajectory, the one that completed it (`None` if it is open), and the number
        of its exchange events. Reads two events and a count, however long the run is. Raises a 404 `ApiError`."""
        opened = (await self.find_to_read(trajectory)).opened
        completed = await self.log.completion(opened)
        if completed is not None:
            return opened, completed, completed.exchanges
        exchanges = await self.log.broker.count(ExchangeRecorded, project=self.project, trajectory=trajectory)
        return opened, None, exchanges

    async def _find_opened(self, trajectory: str) -> Trajectory | None:
        """Return a trajectory from memory, else from the log without its calls; `None` if it was never opened."""
        if run := self._known.get(trajectory):
            return run
        opening = await self.log.opening(trajectory)
        if opening is None:
            return None
        return Trajectory(self.log, opening.event, opening.headers.get("traceparent", ""))

    async def _load(self, trajectory: str) -> Trajectory:
        """Read an open trajectory and its calls from the log. Raises as `find`."""
        if known := self._known.get(trajectory):  # it was opened since `find` looked
            return known
        run = await self.find_to_read(trajectory)
        if await self.log.completion(run.opened) is not None:  # before the calls are read: they may be many
            raise already_completed(trajectory, "it takes no further calls")
        self.log.check_age(trajectory, run.opened.at)
        await run.read_calls()
        return self._remember(run)

    def _remember(self, run: Trajectory) -> Trajectory:
        """Keep a trajectory in memory, and return the one that is in memory by now. If the openings of its key's
        trajectories exceed `_OWNER_BYTES`, forget those unused longest that are not in use: the log has them."""
        known = self._known.setdefault(run.id, run)
        known.used_at = time.monotonic()
        owner = run.opened.owner
        if known is run:
            self._bytes[owner] += _opening_bytes(run)
        if self._bytes[owner] > _OWNER_BYTES:
            # Down to 90 %, so that not every opening has to sort them.
            own = [t for t in self._known.values() if t.opened.owner == owner and t is not known]
            for trajectory in sorted(own, key=lambda t: t.used_at):
                if self._bytes[owner] > 0.9 * _OWNER_BYTES and not (trajectory.in_flight or trajectory.completing):
                    self._forget(trajectory.id)
        return known

    def _forget(self, trajectory: str) -> Trajectory | None:
        """Drop a trajectory from memory, and return it if it was there."""
        run = self._known.pop(trajectory, None)
        if run is not None:
            self._bytes[run.opened.owner] -= _opening_bytes(run)
        return run

    # -- completions by other replicas ---------------------------------------------------------------------------

    async def note_log_end(self) -> None:
        """Note the present end of the stream, where `follow_completions` begins."""
        self._followed_from = (await self.log.broker.stream_info(STREAM)).state.last_seq + 1

    async def follow_completions(self) -> None:
        """Forget trajectories that other gateways complete, so that their calls are refused here too. Never returns."""
        completions = follow_messages(
            self.log.broker, [TrajectoryCompleted], lambda: self._followed_from, project=self.project
        )
        async with aclosing(completions) as messages:
            async for raw in messages:
                run = self._forget(name_of_token(raw.subject.rpartition(".")[2]))
                if run is not None:
                    run.completed = True

    # -- opening and completing ----------------------------------------------------------------------------------

    async def open(
        self,
        event: TrajectoryOpened,
        traceparent: str,
        access: Access | None = None,
        *,
        paced: bool = True,
        named: bool = True,
        assigned: bool = False,
    ) -> Trajectory:
        """Open a trajectory: publish `event` and keep the trajectory in memory. A client's retry, which opens it in the
        same way, returns the trajectory that is open already.

        `traceparent`: W3C trace context of the request; empty: the trajectory's own. `access`: of the key
        `event.owner`; `None`: an agent's. `paced`: whether a new group has to wait while too many are untrained.
        `named`: whether a client chose the id, which then may have been used before. `assigned`: whether `event` says
        already who answers the run.

        Raises an `ApiError`: 409 if the id belongs to a completed trajectory or to one that was opened differently, or
        the group to another key, 410 if the id belonged to a trajectory that expired, 429 if too many groups are
        untrained."""
        event = await self.log.masks.apply(event)
        event = event if assigned else self.assign(event)
        if named:
            if event.trajectory.startswith(f"{DETECTED}-"):
                message = f"Ids that begin with {DETECTED}- are for runs that the gateway detects. Choose another id."
                raise ApiError(400, "invalid_name", message, param="id")
            await self.log.check_id_is_new(event)
        if paced and self.pacing is not None and not event.asked:  # its agent never waited for training
            group = event.group or event.trajectory
            paced_s = await self.pacing.admit(event.model, group, event.split, event.owner)
            event = msgspec.structs.replace(event, paced_s=paced_s)
        if named or event.group not in ("", event.trajectory):
            event = await self.groups.join(event, access or Access(event.owner))
        traceparent = traceparent or trace.traceparent(self.project, event.trajectory)
        ack = await self.log.publish(event, {"traceparent": traceparent})
        if not ack.duplicate:
            self._forget(event.trajectory)  # one that expired
            return self._remember(Trajectory(self.log, event, traceparent))
        # The log already holds an opening with this id.
        run = await self.find_to_read(event.trajectory)
        if not same_opening(run.opened, event):
            message = f"Trajectory {event.trajectory!r} was opened before with other settings. Choose another id."
            raise ApiError(409, "trajectory_exists", message)
        if await self.log.completion(run.opened) is not None:
            raise already_completed(event.trajectory, "choose another id")
        if event.trajectory not in self._known:
            await run.read_calls()
        return self._remember(run)

    async def complete(self, trajectory: str, completion: Completion, *, inferred: bool = False) -> TrajectoryCompleted:
        """Complete a trajectory. Completing it again with the same results returns the first completion.

        Raises an `ApiError`: 404 if the trajectory is unknown; 409 if it was completed with other results or if its
        calls do not end within 30 seconds; 410 if it expired."""
        try:
            run = await self.find(trajectory)
        except ApiError as error:
            if error.code != "trajectory_completed":
                raise
            return await self._complete_again(trajectory, completion, inferred)
        self.log.check_age(trajectory, run.opened.at)
        await self._wait_until_idle(run)
        run.completions += 1  # from now on no call begins, unless this fails
        try:
            if completion.exchanges:
                sources = await self._sources(trajectory, run.opened.named, completion.exchanges)
                await copy_calls(run, [(sources[r.trajectory], r) for r in completion.exchanges])
            await run.refresh()
            event = await _completion_event(run, completion, inferred)
            ack = await self.log.publish(event, {"traceparent": run.traceparent})
            run.completed = True
        finally:
            run.completions -= 1
        self._forget(trajectory)
        return await self._complete_again(trajectory, completion, inferred) if ack.duplicate else event

    async def check_references(self, trajectory: str, model: str, references: Sequence[Reference]) -> None:
        """Check that a trajectory, which need not be open, can be made of these calls. `model`: the name that agents
        give it. Raises an `ApiError`: 404 if a call or its trajectory is unknown, 400 if its answers carry no
        references or are of a model with another name."""
        sources = await self._sources(trajectory, model, references)
        for reference in references:
            if await sources[reference.trajectory].stream_seq_of(reference.reply, reference.choice) is None:
                raise no_such_call(reference)

    async def _sources(self, trajectory: str, model: str, references: Sequence[Reference]) -> dict[str, Trajectory]:
        """Return the trajectories that recorded the calls of `references`, by id. `trajectory`, `model`: of the
        trajectory that is to be made of the calls. Raises as `check_references`."""
        sources: dict[str, Trajectory] = {}
        for name in dict.fromkeys(reference.trajectory for reference in references):
            try:
                source = await self.find(name)
            except ApiError as error:
                if error.code != "trajectory_completed":
                    raise
                source = await self.find_to_read(name)
            if not source.opened.references or source.opened.named != model:
                message = (
                    f"Calls of trajectory {name!r} can't make up {trajectory!r}: it must be opened with `references`, "
                    f"for the model {model!r}."
                )
                raise ApiError(400, "wrong_reference", message, param="exchanges")
            sources[name] = source
        return sources

    async def _wait_until_idle(self, run: Trajectory) -> None:
        """Wait until no call of the run is in flight, for `_SETTLE_S` at most; then raise a 409 `ApiError`."""
        try:
            async with asyncio.timeout(_SETTLE_S):
                while run.in_flight:  # again, if a call began before this task had its turn
                    await run.idle.wait()
        except TimeoutError:
            message = f"Trajectory {run.id!r} still has {run.in_flight} calls in flight. Complete it after they end."
            raise ApiError(409, "calls_in_flight", message) from None

    async def _complete_again(self, trajectory: str, body: Completion, inferred: bool) -> TrajectoryCompleted:
        """Return the event that completed a trajectory, for a client's repeated request with the results in `body`.
        Raises a 409 `ApiError` if these are other results."""
        opened, recorded, _ = await self.describe(trajectory)
        run = Trajectory(self.log, opened)
        if recorded is not None:
            # The run's calls are not read again.
            run.recorded.not_whole = int(recorded.metrics.get(NOT_RECORDED, 0))
            repeated = await _completion_event(run, body, inferred)
            if _repeatable_fields(recorded) == _repeatable_fields(repeated):
                return recorded
        raise already_completed(trajectory, "it can't be completed again with other results")


def _opening_bytes(run: Trajectory) -> int:
    """About how many bytes of memory a trajectory takes by its opening: at least a KiB."""
    return 1024 + len(run.opened.metadata) + len(run.opened.task)


def _repeatable_fields(completed: TrajectoryCompleted) -> tuple[object, ...]:
    """Return the fields that a repeated completion must have too; a completion that differs in one is refused."""
    c = completed
    return c.outcome, c.reward, c.rewards, c.metrics, c.batch, bytes(c.metadata)


async def _completion_event(run: Trajectory, body: Completion, inferred: bool) -> TrajectoryCompleted:
    """Return the event that completes a run with the results in `body`, masked. `inferred`: the gateway completes a
    detected run, and no client asked for it."""
    opened, outcome, metrics, calls = run.opened, body.outcome, body.metrics, run.recorded
    if missing := calls.not_whole:
        # Calls that can't be read can't be trained. That is a failure of infrastructure, which never becomes a reward.
        outcome, metrics = "no_result", {**metrics, NOT_RECORDED: float(missing)}
    metadata = msgspec.json.decode(opened.metadata or b"{}", type=dict[str, Any])
    completed = TrajectoryCompleted(
        **{name: getattr(opened, name) for name in TrajectoryEvent.__struct_fields__ if name not in ("at", "v")},
        outcome=outcome,
        reward=body.reward,
        rewards=body.rewards,
        metrics=metrics,
        metadata=msgspec.json.encode(metadata | body.metadata),
        exchanges=calls.exchanges,
        first_step=max(calls.first_step, 0),
        last_step=max(calls.last_step, 0),
        opened_at=opened.at,
        inferred=inferred,
        batch=body.batch.of_owner(opened.owner) if body.batch is not None else None,
        calls=calls.next_seq,
        prompt_tokens=calls.prompt_tokens,
        sampled_tokens=calls.sampled_tokens,
        calls_s=calls.calls_us / 1e6,
        cost_usd=calls.cost_usd,
    )
    return await run.log.masks.apply(completed)
