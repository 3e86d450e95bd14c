"""The trainer service: scored groups in, committed checkpoints out.

Three tasks run side by side. The intake takes `group.scored` events from the durable consumer `trainer`, publishes
a discard for those that can't train and queues the others by model in stream order. The step loop waits until a
model has `trainer.groups_per_step` groups, reads their exchanges, computes the step in a thread and commits it.
The third task looks after every reconnect whether the log is whole. The broker's heartbeats keep held groups from
being redelivered meanwhile.

A commit takes four steps: checkpoint on disk, adapter in the object store, `policy.checkpoint` on the log, groups
acknowledged. After a crash between any two of them, the next start compares disk and log and does the rest
(`trainer.recovery`). A log that lost its end in a power cut ends the trainer, so its next start repairs that, too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial

import anyio
import msgspec
from anyio.to_thread import run_sync

from pipeline import streams
from pipeline.config import Config
from pipeline.events import (
    DeadLettered,
    GroupDiscarded,
    GroupScored,
    encode,
)
from pipeline.log.broker import Broker, Consumption, Delivery
from pipeline.log.messages import Place
from pipeline.names import branch_model
from pipeline.running.service import Ready
from pipeline.telemetry.logs import get_logger
from trainer.batches.groups import Refusal, TrainingGroup, trainable_members
from trainer.batches.histories import Histories
from trainer.batches.tasks import WINDOW, EarlierRuns
from trainer.checkpoints.commits import Commits, LogShrankError
from trainer.checkpoints.consumed import Consumed
from trainer.checkpoints.retention import Retention
from trainer.engine.late import LateRunsError
from trainer.engine.parallel import ProcessGroup
from trainer.engine.state import UntrainableError
from trainer.gpu_turns import GpuTurns
from trainer.learner import Learner, PendingStep, make_learners
from trainer.lease import Lease
from trainer.queues import ModelQueue, RequestedBatch
from trainer.recovery import catch_up, unacknowledged

log = get_logger("trainer")

_RECONNECT_CHECK_S = 1.0
_EXCHANGE_MEMORY_BYTES = 32 * 1024 * 1024
"""A trajectory's exchanges are read one after the other, and once: more of them need not be remembered."""
_LOOK_S = 0.5
"""Seconds between two looks at whether a trainer that is to end has all groups."""
_CONSUMED_KEPT = 10_000
"""With more places of consumed groups in memory, those that the server has acknowledged are dropped."""


class Trainer:
    """Trains the models of `learners` from the groups on the log. `broker` must outlive it."""

    def __init__(
        self, config: Config, broker: Broker, learners: Mapping[str, Learner], gpu: GpuTurns
    ) -> None:
        self.config, self.broker, self._gpu = config, broker, gpu
        self.queues = {
            name: ModelQueue(
                learner,
                Histories(
                    broker,
                    learner.sampling_defaults,
                    mask_truncated=learner.settings.loss.mask_truncated,
                    replay=learner.settings.router_replay,
                    turn_discount=learner.settings.loss.turn_discount,
                    prompts=learner.prompts,
                    asks_outside=learner.settings.distill.asks_outside,
                ),
            )
            for name, learner in learners.items()
        }
        self.commits = Commits(broker, config)
        self._consumer = streams.trainer_consumer(config.trainer.branch)
        self._consumed = Consumed()
        self._newest = Place(0, 0)
        """The newest group that was delivered, or was read at the start."""
        self._validated_to = 0
        """The validation groups up to this sequence were counted at the start."""
        self._redeliveries = 0
        """How many messages that a trainer before this one held the server still has to deliver again."""
        self._redelivered = anyio.Event()
        self._group_queued = anyio.Event()

    # -- start and log -------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Bring every model to its newest committed step, and queue the groups that wait for the next ones."""
        state = (await self.broker.stream_info(self._consumer.stream)).state
        for name, queue in self.queues.items():
            published = await catch_up(self.commits, queue.learner)
            for event in published:
                self._consumed.add_checkpoint(event, state.first_seq)
            if self.config.trainer.branch != "main":
                first = min(published, key=lambda event: event.step, default=None)
                queue.histories.shared_until = first.step if first is not None and "#" in first.source else 0
            scored = await self.broker.read(
                GroupScored, project=self.config.project, model=name, branch=self.config.trainer.branch, split="val"
            )  # fmt: skip
            await self._record_validation(queue, [r.event for r in scored if r.seq <= state.last_seq])
            log.info("resumed", model=name, step=queue.step, version=queue.learner.version)
        self._validated_to = state.last_seq
        self._redeliveries, groups = await unacknowledged(self.broker, self._consumer, self._consumed)
        for recorded in groups:
            await self._admit(recorded.event, recorded.place, None)

    async def require_whole_log(self) -> None:
        """Raise `LogShrankError` if the log lost its end: the newest group that was read, or a committed step."""
        if self._newest.seq and not await self.broker.has_reached(self._consumer.stream, self._newest):
            raise LogShrankError(
                f"the log lost its end: message {self._newest.seq} of {self._consumer.stream} is gone. Start the "
                "trainer again: it reads the log anew"
            )
        for name, queue in self.queues.items():
            await self.commits.require_on_log(name, queue.step)

    async def watch_log(self) -> None:
        """After every reconnect, check that the log is whole: its machine may have lost power. Runs until cancelled.
        Raises `LogShrankError`."""
        checked = self.broker.client.stats["reconnects"]
        while True:
            await anyio.sleep(_RECONNECT_CHECK_S)
            reconnects = self.broker.client.stats["reconnects"]
            if reconnects != checked:
                await self.require_whole_log()
                checked = reconnects

    # -- intake --------------------------------------------------------------------------------------------------

    async def intake(self, consumption: Consumption) -> None:
        """Queue the groups that are delivered. Runs until cancelled."""
        while True:
            for delivery in await self.broker.retry(
                partial(consumption.batch, 256), "groups were not delivered"
            ):
                if isinstance(delivery.event, GroupScored):
                    await self._admit(delivery.event, delivery.place, delivery)
                else:
                    log.warning("event skipped: it is not a scored group", subject=delivery.subject)
                    await delivery.ack()
                self._redeliveries -= delivery.deliveries > 1
            self._redelivered.set()
            await self._end_incomplete_batches()
            if len(self._consumed) > _CONSUMED_KEPT:
                floor = await self._ack_floor()
                self._consumed.forget(floor)
                for queue in self.queues.values():
                    if queue.earlier_runs is not None:
                        queue.earlier_runs.forget(floor)

    async def until_redelivered(self, timeout_s: float) -> None:
        """Wait until the server delivered again what a trainer before this one held, at most `timeout_s` seconds. The
        intake acknowledges what is trained already. Without this, a trainer that resumes and soon reaches `max_steps`
        would leave such groups pending until its next start."""
        with anyio.move_on_after(timeout_s):
            while self._redeliveries > 0:
                self._redelivered = anyio.Event()
                await self._redelivered.wait()

    async def _admit(self, event: GroupScored, place: Place, delivery: Delivery | None) -> None:
        if 0 < place.seq <= self._consumed.floor:
            raise LogShrankError(
                f"the log lost its end: it delivers group {event.group} again, which was acknowledged. Start the "
                "trainer again: it reads the log anew"
            )
        self._newest = max(self._newest, place)
        # Groups of other branches wait for a trainer of their own. Runs of a branch's versions, which evaluations play,
        # are trained by none.
        of_branch = any(event.model.startswith(branch_model(name, "")) for name in self.queues)
        if place in self._consumed or event.branch != self.config.trainer.branch or of_branch:
            if delivery is not None:
                await delivery.ack()
            return
        group = TrainingGroup(event, place, delivery)
        queue = self.queues.get(event.model)
        if queue is None or event.project != self.config.project:
            await self._dead_letter(
                group, "unknown_model",
                f"no model of this trainer is {event.model} of project {event.project}: after a start with that model, "
                "`journeywork dead retry` trains it",
            )  # fmt: skip
            return
        for waiting in queue.groups():
            # Names first: thousands of groups may wait, and a subject takes time to build.
            if waiting.event.group == event.group and waiting.event.subject() == event.subject():
                # The same group: delivered again, or scored again after the log lost its first event.
                waiting.place, waiting.delivery = place, delivery
                await self._compare_with_earlier(queue, waiting)
                return
        await queue.begin_requested(event, self.broker, self._consumer.name)
        await self._compare_with_earlier(queue, group)
        refusal = await self._consumed.refuse_repeated(event, self.broker)
        if refusal is None:
            if place.seq > self._validated_to:
                await self._record_validation(queue, [event])
            refusal = group.refuse(queue.step, queue.settings_of(event.batch))
        if refusal is not None:
            await self._discard(queue, group, refusal)
            return
        queue.add(group)
        self._group_queued.set()

    async def _compare_with_earlier(self, queue: ModelQueue, group: TrainingGroup) -> None:
        """Give a group the earlier runs of its task, if its step compares it with them. They are read from the log when
        the first group asks for them; groups that are delivered later are added."""
        event, seq = group.event, group.place.seq
        discount = queue.settings.loss.turn_discount
        asked = queue.settings_of(event.batch).loss.baseline == "task"
        if queue.earlier_runs is None and asked:
            queue.earlier_runs = EarlierRuns()
            for recorded in await self.broker.read(
                GroupScored, project=event.project, model=event.model, branch=event.branch,
                start_seq=max(min(await self._ack_floor() + 1, seq) - WINDOW, 1),
            ):  # fmt: skip
                members = trainable_members(recorded.event)
                queue.earlier_runs.add(recorded.event, members, recorded.seq, discount)
        if queue.earlier_runs is not None:
            queue.earlier_runs.add(event, group.members, seq, discount)
        if queue.earlier_runs is not None and asked:
            group.earlier = queue.earlier_runs.before(event, seq)

    async def _ack_floor(self) -> int:
        """The sequence up to which the server knows every acknowledgement."""
        info = await self.broker.consumer_info(self._consumer)
        return int(info.ack_floor.stream_seq) if info.ack_floor else 0

    async def _record_validation(self, queue: ModelQueue, groups: Sequence[GroupScored]) -> None:
        validation = queue.learner.validation
        if validation.record(groups) and validation.best is not None:
            await run_sync(queue.learner.checkpoints.set_best, validation.best)  # it waits for the disk

    async def _discard(self, queue: ModelQueue, group: TrainingGroup, refusal: Refusal) -> None:
        event = group.event
        if refusal.reason == "stale" and group.sequences is None:
            await queue.histories.read(group)  # sets `duration_s`, which shows whether long tasks starve
        await self.broker.publish(
            GroupDiscarded(
                project=event.project, group=event.group, model=event.model,
                trajectories=tuple(m.trajectory for m in event.members), reason=refusal.reason, by="trainer",
                split=event.split, detail=refusal.detail, version=queue.learner.version,
                duration_s=group.duration_s, branch=event.branch, owner=event.owner, judge=event.judge,
            )
        )  # fmt: skip
        if refusal.reason != "repeated":  # its rewards were counted when it was trained
            rewards = [m.reward for m in group.members]
            queue.learner.record_discarded(rewards, equal=refusal.reason == "no_variance")
        queue.settle(event)
        log.info("group discarded", group=event.group, reason=refusal.reason, detail=refusal.detail)
        await self._finish(group)

    async def _dead_letter(self, group: TrainingGroup, reason: str, detail: str) -> None:
        """Move a group that can't be trained to the dead letters, so that it is not delivered again."""
        event = group.event
        await self.broker.publish(
            DeadLettered(
                project="", stream=self._consumer.stream, stream_seq=group.place.seq, stream_at=group.place.at,
                original_subject=event.subject(), consumer=self._consumer.name, reason=reason, detail=detail,
                payload=encode(event),
            )
        )  # fmt: skip
        log.error("group moved to the dead letters", group=event.group, reason=reason, detail=detail)
        await self._finish(group)

    async def _finish(self, group: TrainingGroup) -> None:
        """Acknowledge a group that is not trained. Its batch may be complete without it."""
        self._consumed.add(group.place)
        self._group_queued.set()
        if group.delivery is not None:
            await group.delivery.ack()

    # -- steps ---------------------------------------------------------------------------------------------------

    async def run_steps(self, until_empty: bool = False) -> None:
        """Train until every model has reached `max_steps`; with `until_empty`, also until no group on the log is left
        that makes a step full. Of the models with enough groups, the one with the fewest steps is next."""
        while not all(q.finished for q in self.queues.values()):
            queue = self._next_queue()
            if queue is None:
                self._group_queued = anyio.Event()
                if until_empty and await self._has_all_groups():
                    return
                with anyio.move_on_after(_LOOK_S if until_empty else None):
                    await self._group_queued.wait()
                continue
            if await self._fill_batch(queue):
                await self._step(queue)

    async def _has_all_groups(self) -> bool:
        """Whether the groups that wait here are all that the log has to deliver."""
        info = await self.broker.consumer_info(self._consumer)
        held = sum(1 for queue in self.queues.values() for _ in queue.groups())
        return not info.num_pending and int(info.num_ack_pending or 0) <= held

    def _next_queue(self) -> ModelQueue | None:
        ready = [q for q in self.queues.values() if q.full and not q.finished]
        return min(ready, key=lambda q: (q.step, q.first_seq), default=None)

    async def _fill_batch(self, queue: ModelQueue) -> bool:
        """Move groups that can train at the current step into the batch. Returns whether the batch is full. A requested
        batch comes before other groups, and is full with what is left of it."""
        settings = queue.settings
        if queue.next_requested():
            await self._refuse_untrainable(queue, list(queue.batch))
            return bool(queue.batch)
        queue.request = None
        while len(queue.batch) < settings.groups_per_step and queue.waiting:
            missing = settings.groups_per_step - len(queue.batch)
            candidates = [queue.waiting.popleft() for _ in range(min(missing, len(queue.waiting)))]
            queue.batch += candidates
            await self._refuse_untrainable(queue, candidates)
        return len(queue.batch) == settings.groups_per_step

    async def _refuse_untrainable(self, queue: ModelQueue, candidates: Sequence[TrainingGroup]) -> None:
        """Read the exchanges of groups of the batch, and take those out of it that can't train at the current step."""
        refusals = await queue.histories.read_all(candidates)
        settings = queue.settings_of(queue.request)
        for group in candidates:
            # Decoding images takes a while.
            if reason := await run_sync(queue.learner.unusable, group.sequences or ()):
                queue.batch.remove(group)
                await self._dead_letter(group, "untrainable", reason)
                continue
            refusal = (
                refusals.get(group.place)
                or group.refuse(queue.step, settings)
                or group.bound_staleness(queue.step, settings)
            )
            if refusal is not None:
                await self._discard(queue, group, refusal)
                queue.batch.remove(group)

    async def _refuse_stale_batches(self, queue: ModelQueue) -> None:
        """Discard the groups of incomplete requested batches that became too old. Their agent may have died before it
        completed the others."""
        for group in [group for batch in queue.incomplete() for group in batch.groups]:
            if refusal := group.refuse(queue.step, queue.settings_of(group.event.batch)):
                await self._discard(queue, group, refusal)

    async def _end_incomplete_batches(self) -> None:
        """Discard the groups of requested batches to which nothing came for `trainer.batch_timeout_s`.

        At most half of the groups that the log delivers without an acknowledgement may wait for others of their batch:
        with all of them, the log would deliver no more. Beyond that, the owner with most of them loses the oldest."""
        now = anyio.current_time()
        batches = [(queue, batch) for queue in self.queues.values() for batch in queue.incomplete()]
        waiting: dict[str, deque[tuple[ModelQueue, RequestedBatch]]] = {}
        for queue, batch in batches:
            timeout_s = queue.settings.batch_timeout_s
            if now - batch.changed < timeout_s:
                waiting.setdefault(batch.request.owner, deque()).append((queue, batch))
                continue
            why = f"no group of batch {batch.request.id} was scored or discarded for {timeout_s:g} s"
            await self._end_batch(queue, batch, why)
        bound = self._consumer.max_ack_pending // 2
        counts = Counter(
            {owner: sum(len(b.groups) for _, b in of_owner) for owner, of_owner in waiting.items()}
        )
        while counts.total() > bound:
            owner, count = counts.most_common(1)[0]
            queue, batch = waiting[owner].popleft()
            counts[owner] -= len(batch.groups)
            why = f"{count} groups of key {owner!r} wait for others of their batches, of {bound} for all keys"
            await self._end_batch(queue, batch, why)

    async def _end_batch(self, queue: ModelQueue, batch: RequestedBatch, why: str) -> None:
        for group in list(batch.groups):
            await self._discard(queue, group, Refusal("incomplete", why))

    async def _step(self, queue: ModelQueue) -> None:
        """Train the batch and commit the step. A batch that can't be trained loses the groups at fault; what is left of
        it waits for more groups, or is trained if it was requested."""
        await (
            self.require_whole_log()
        )  # a group that the log lost and that was scored again may be in the batch
        try:
            pending = await self._compute(queue)
        except UntrainableError as error:
            if isinstance(error, LateRunsError):
                for group in queue.learner.late_groups(queue.batch, queue.request):
                    group.late_refused = str(error)
                await self._refuse_untrainable(queue, list(queue.batch))
            else:
                await self._remove_faults(queue, error)
            if queue.request is not None and queue.batch:
                await self._step(queue)
            return
        # The step is on disk. Finish the commit even if the service is stopped: that is faster than a recovery.
        with anyio.CancelScope(shield=True):
            await self._commit(queue, pending)
            await self._refuse_stale_batches(queue)

    async def _commit(self, queue: ModelQueue, pending: PendingStep) -> None:
        learner, event = queue.learner, pending.manifest.event
        await self.commits.require_on_log(
            learner.model.name, queue.step
        )  # so that the log holds the steps in order
        await self.commits.publish(pending.manifest, pending.files)
        await run_sync(learner.commit, pending)
        for group in queue.batch:
            self._consumed.add(group.place)
            if group.delivery is not None:
                acknowledge = partial(group.delivery.ack, confirmed=True)
                await self.broker.retry(acknowledge, "a group was not acknowledged")
        queue.batch = []
        metrics = {k: round(v, 6) for k, v in event.metrics.items()}
        log.info("step", version=event.version, batch=event.batch_id, **metrics)

    async def _compute(self, queue: ModelQueue) -> PendingStep:
        """Compute the step in a thread, and read the exchanges of the next batch meanwhile."""
        error: UntrainableError | None = None
        next_batch = list(queue.waiting)[: queue.settings.groups_per_step]
        async with anyio.create_task_group() as tg:
            # Groups whose exchanges are gone are discarded when their turn comes.
            tg.start_soon(queue.histories.read_all, next_batch)
            try:
                async with self._gpu.turn():
                    return await run_sync(
                        queue.learner.train_step, queue.batch, _trace_of(queue.batch), queue.request
                    )
            except UntrainableError as caught:
                error = caught  # raised below, as a task group would wrap it
        assert error is not None
        raise error

    async def _remove_faults(self, queue: ModelQueue, error: UntrainableError) -> None:
        """Move the groups that made their batch fail to the dead letters: those that can't be trained alone, or all if
        each of them can."""
        faults = dict.fromkeys(queue.batch, str(error))
        if len(queue.batch) > 1:
            async with self._gpu.turn():
                alone = await run_sync(queue.learner.faults, queue.batch, queue.request)
            faults = alone or faults
        for group, detail in faults.items():
            queue.batch.remove(group)
            await self._dead_letter(group, error.reason, detail)


def _trace_of(batch: Sequence[TrainingGroup]) -> dict[str, str]:
    """The trace headers of the first group that carries any: the step belongs to its trace."""
    for group in batch:
        headers = group.delivery.headers if group.delivery is not None else {}
        if "traceparent" in headers:
            return {k: v for k, v in headers.items() if k in ("traceparent", "tracestate")}
    return {}


def user_of(config: Config) -> str:
    """Return the NATS user that may publish checkpoints of the configured branch."""
    return "trainer" if config.trainer.branch == "main" else "experiment"


async def train(
    config: Config, ready: Ready, process_group: ProcessGroup | None = None, *, until_empty: bool = False
) -> None:
    """Train until every model has reached `trainer.max_steps`, or until cancelled if that is 0. With `until_empty`, end
    too once the log has no more groups for a full step.

    `ready` is called once recovery is complete. `process_group` connects to the other processes that share the passes
    of a step. Raises `TrainerError` if disk and log do not belong together; `LogShrankError`, in a group."""
    scratch = config.path(config.trainer.checkpoints)
    remembered = min(config.nats.exchange_memory_bytes, _EXCHANGE_MEMORY_BYTES)
    nats = msgspec.structs.replace(config.nats, exchange_memory_bytes=remembered)
    async with Broker.connect(nats, name=user_of(config)) as broker, aclosing(GpuTurns(config)) as gpu:
        async with gpu.turn():
            learners = await run_sync(make_learners, config, scratch, process_group)
            gpu.add(learner.engine.model for learner in learners.values())
        with Lease(broker, config, user_of(config)) as lease:
            if not await lease.take():
                log.warning("another trainer trains this branch: this one waits until it ends")
                ready(step=0)
                await lease.wait()
            try:
                trainer = Trainer(config, broker, learners, gpu)
                await _train(trainer, learners, lease, ready, until_empty=until_empty)
            finally:
                await lease.release()


async def _train(
    trainer: Trainer, learners: Mapping[str, Learner], lease: Lease, ready: Ready, *, until_empty: bool
) -> None:
    config, broker = trainer.config, trainer.broker
    spec = streams.trainer_consumer(config.trainer.branch)
    await broker.provision_consumer(spec)
    await trainer.recover()
    ready(step=max(q.step for q in trainer.queues.values()))
    try:
        async with broker.consume(spec) as consumption, anyio.create_task_group() as tg:
            tg.start_soon(lease.keep)
            tg.start_soon(trainer.intake, consumption)
            tg.start_soon(trainer.watch_log)
            tg.start_soon(Retention(config, broker, learners).run)
            await trainer.run_steps(until_empty)
            await trainer.until_redelivered(2 * spec.ack_wait_s)
            tg.cancel_scope.cancel()
    except* LogShrankError:
        log.error("the log lost its end: the trainer ends, and reads it anew at its next start")
        raise


async def serve(config: Config, ready: Ready, process_group: ProcessGroup | None = None) -> None:
    """Train until cancelled. After `trainer.max_steps` the service stays up idle, and new groups stay on the log."""
    await train(config, ready, process_group)
    log.info("training has ended: every model reached trainer.max_steps")
    await anyio.sleep_forever()
