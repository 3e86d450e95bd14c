"""The trainer service: scored groups in, committed checkpoints out.

Three tasks run side by side. The intake takes `group.scored` events from the durable consumer `trainer`, publishes
a discard for those that can't train and queues the others by model in stream order. The step loop waits until a
model has `trainer.groups_per_step` groups, reads their exchanges, computes the step in a thread and commits it.
The third task publishes checkpoints again that the log lost in a power cut. The broker's heartbeats keep held
groups from being redelivered meanwhile.

A commit takes four steps: checkpoint on disk, adapter in the object store, `policy.checkpoint` on the log, groups
acknowledged. After a crash between any two of them, `recover` compares disk and log at the next start and does the
rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import anyio
import anyio.to_thread

from pipeline import streams
from pipeline.config import Config
from pipeline.events import (
    DeadLettered,
    GroupDiscarded,
    GroupScored,
    encode,
)
from pipeline.log.broker import Broker, Consumption, Delivery, HistoryGoneError
from pipeline.log.messages import Place
from pipeline.log.subjects import stream_of
from pipeline.running.service import Ready
from pipeline.telemetry.logs import get_logger
from trainer.batches.groups import Refusal, TrainingGroup
from trainer.batches.histories import Histories
from trainer.checkpoints.commits import Commits
from trainer.checkpoints.consumed import Consumed
from trainer.checkpoints.retention import Retention
from trainer.engine.parallel import ProcessGroup
from trainer.engine.state import UntrainableError
from trainer.learner import Learner, PendingStep, make_learners
from trainer.queues import ModelQueue

log = get_logger("trainer")

_RECONNECT_CHECK_S = 1.0


class Trainer:
    """Trains the models of `learners` from the groups on the log. `broker` must outlive it."""

    def __init__(self, config: Config, broker: Broker, learners: Mapping[str, Learner]) -> None:
        self.config, self.broker = config, broker
        self.queues = {
            name: ModelQueue(
                learner,
                Histories(
                    broker, learner.sampling_defaults, mask_truncated=learner.settings.loss.mask_truncated
                ),
            )
            for name, learner in learners.items()
        }
        self._consumed = Consumed()
        self._redeliveries = 0
        """How many messages that a trainer before this one held the server still has to deliver again."""
        self._redelivered = anyio.Event()
        self._group_queued = anyio.Event()
        self._publishing = anyio.Lock()
        self.commits = Commits(broker, config)

    # -- recovery ------------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Bring every model to its newest committed step, and publish checkpoints that only the disk holds."""
        for name, queue in self.queues.items():
            published = await self.commits.published(name)
            for event in published:
                self._consumed.add_checkpoint(event)
            last = max(published, key=lambda e: e.step, default=None)
            for manifest in await self.commits.recover(queue.learner, last):
                self._consumed.add_checkpoint(manifest.event)
            log.info("resumed", model=name, step=queue.step, version=queue.learner.version)
        await self._queue_unacknowledged()

    async def _queue_unacknowledged(self) -> None:
        """Queue, in stream order, the groups that a trainer before this one held when it died: the server delivers
        them again only after `ack_wait`, behind newer groups."""
        spec = streams.trainer_consumer(self.config.trainer.branch)
        info = await self.broker.consumer_info(spec)
        floor = int(info.ack_floor.stream_seq) if info.ack_floor else 0
        delivered = int(info.delivered.stream_seq) if info.delivered else 0
        self._redeliveries = int(info.num_ack_pending or 0)
        if not self._redeliveries:
            return
        scored = await self.broker.read(GroupScored, start_seq=floor + 1)
        discarded = {
            (r.event.branch, r.event.model, r.event.group)
            for r in await self.broker.read(GroupDiscarded, start_seq=floor + 1)
            # `too_large` concerns some trajectories; the group itself trains.
            if r.event.by == "trainer" and r.event.reason != "too_large"
        }
        for recorded in scored:
            event = recorded.event
            if recorded.seq > delivered:
                break
            if (event.branch, event.model, event.group) in discarded:
                self._consumed.add(recorded.place)
            await self._admit(event, recorded.place, None)

    async def republish_after_reconnects(self) -> None:
        """After every reconnect, publish the checkpoints again that the log no longer holds: its machine may have
        lost power. Runs until cancelled."""
        seen = self.broker.client.stats["reconnects"]
        while True:
            await anyio.sleep(_RECONNECT_CHECK_S)
            now = self.broker.client.stats["reconnects"]
            if now == seen:
                continue
            for queue in self.queues.values():
                async with self._publishing:
                    await self.commits.republish_lost(queue.learner)
            seen = now

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

    async def until_redelivered(self, timeout_s: float) -> None:
        """Wait until the server delivered again what a trainer before this one held, at most `timeout_s` seconds. The
        intake acknowledges what is trained already. Without this, a trainer that resumes and soon reaches `max_steps`
        would leave such groups pending until its next start."""
        with anyio.move_on_after(timeout_s):
            while self._redeliveries > 0:
                self._redelivered = anyio.Event()
                await self._redelivered.wait()

    async def _admit(self, event: GroupScored, place: Place, delivery: Delivery | None) -> None:
        if self._consumed.has(place, event.group):
            if delivery is not None:
                await delivery.ack()
            return
        queue = self.queues.get(event.model)
        ours = (self.config.project, self.config.trainer.branch)
        if queue is None or (event.project, event.branch) != ours:
            log.warning(
                "group skipped: no model of this trainer has its project, name and branch", group=event.group,
                model=event.model, project=event.project, branch=event.branch, owner=event.owner,
            )  # fmt: skip
            if delivery is not None:
                await delivery.ack()
            return
        for held in queue.held():
            if held.event.subject() == event.subject():
                # The same group: delivered again, or scored again after the log lost its first event.
                held.place, held.delivery = place, delivery
                return
        group = TrainingGroup(event, place, delivery)
        await queue.expect(event, self.broker)
        refusal = await self._refuse_repeated(event)
        if refusal is None:
            queue.learner.record_validation(event)
            refusal = group.refuse(queue.step, queue.settings)
        if refusal is not None:
            await self._discard(queue, group, refusal)
            return
        queue.add(group)
        self._group_queued.set()

    async def _refuse_repeated(self, event: GroupScored) -> Refusal | None:
        """Refuse a group that was already trained, and was scored again because the log lost its event in a power cut.

        Returns `None` if `event` is another group with the same id: the earlier event is still on the log, or the
        stream's retention removed it."""
        before = self._consumed.trained(event.model, event.group)
        if before is None or not before.place.at:
            return None
        try:
            found = await self.broker.read_at(GroupScored, before.place.seq)
        except HistoryGoneError:
            state = (await self.broker.stream_info(stream_of(GroupScored))).state
            if before.place.seq < state.first_seq:
                return None
        else:
            if found.place == before.place:
                return None
        return Refusal(
            "repeated",
            f"already trained in {before.version}; the log lost the group's first event and it was scored again",
        )

    async def _discard(self, queue: ModelQueue, group: TrainingGroup, refusal: Refusal) -> None:
        event = group.event
        if refusal.reason == "stale" and group.sequences is None:
            await queue.histories.read(group)  # sets `duration_s`, which shows whether long tasks starve
        await self.broker.publish(
            GroupDiscarded(
                project=event.project, group=event.group, model=event.model,
                trajectories=tuple(m.trajectory for m in event.members), reason=refusal.reason, by="trainer",
                split=event.split, detail=refusal.detail, version=queue.learner.version,
                duration_s=group.duration_s, branch=event.branch,
            )
        )  # fmt: skip
        self._consumed.add(group.place)
        queue.learner.without_variance += refusal.reason == "no_variance"
        queue.settle(event)
        self._group_queued.set()  # the group's batch may be complete without it
        if refusal.reason != "repeated":  # its rewards were counted when it was trained
            queue.learner.untrained_rewards += [m.reward for m in group.members]
        if group.delivery is not None:
            await group.delivery.ack()
        log.info("group discarded", group=event.group, reason=refusal.reason, detail=refusal.detail)

    # -- steps ---------------------------------------------------------------------------------------------------

    async def run_steps(self) -> None:
        """Train until every model has reached `max_steps`. Of the models with enough groups, the one with the fewest
        steps is next."""
        while not all(q.finished for q in self.queues.values()):
            queue = self._next_queue()
            if queue is None:
                self._group_queued = anyio.Event()
                await self._group_queued.wait()
                continue
            if await self._fill_batch(queue):
                await self._step(queue)

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
        for group in candidates:
            if token := queue.learner.unknown_token(group.sequences or ()):
                await self._dead_letter(queue, [group], f"token {token} is not in the model's vocabulary")
                continue
            refusal = (
                refusals.get(group.place)
                or group.refuse(queue.step, queue.settings)
                or group.bound_staleness(queue.step, queue.settings)
            )
            if refusal is not None:
                await self._discard(queue, group, refusal)
                queue.batch.remove(group)

    async def _refuse_stale_batches(self, queue: ModelQueue) -> None:
        """Discard the groups of incomplete requested batches that became too old. Their agent may have died before it
        completed the others."""
        for group in queue.incomplete():
            if refusal := group.refuse(queue.step, queue.settings):
                await self._discard(queue, group, refusal)

    async def _step(self, queue: ModelQueue) -> None:
        learner = queue.learner
        try:
            pending = await self._compute(queue)
        except UntrainableError as error:
            await self._dead_letter(queue, list(queue.batch), str(error), error.reason)
            return
        event = pending.manifest.event
        # The step is on disk. Finish the commit even if the service is stopped: that is faster than a recovery.
        with anyio.CancelScope(shield=True):
            async with self._publishing:
                await self.commits.republish_lost(learner)  # first, so that the log holds the steps in order
                await self.commits.publish(pending.manifest, pending.adapter)
                await self.commits.run_in_thread(learner.commit, pending)
            self._consumed.add_checkpoint(event)
            for group in queue.batch:
                if group.delivery is not None:
                    acknowledge = partial(group.delivery.ack, confirmed=True)
                    await self.broker.retry(acknowledge, "a group was not acknowledged")
            queue.batch = []
            await self._refuse_stale_batches(queue)
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
                return await self.commits.run_in_thread(
                    queue.learner.train_step, queue.batch, _trace_of(queue.batch), queue.request
                )
            except UntrainableError as caught:
                error = caught  # raised below, as a task group would wrap it
        assert error is not None
        raise error

    async def _dead_letter(
        self, queue: ModelQueue, groups: list[TrainingGroup], detail: str, reason: str = "untrainable"
    ) -> None:
        """Move groups of the batch that can't be trained to the dead letters, so that they are not delivered again."""
        for group in groups:
            await self.broker.publish(
                DeadLettered(
                    project="", stream=stream_of(GroupScored), stream_seq=group.place.seq, stream_at=group.place.at,
                    original_subject=group.event.subject(), consumer="trainer", reason=reason, detail=detail,
                    payload=encode(group.event),
                )
            )  # fmt: skip
            self._consumed.add(group.place)
            if group.delivery is not None:
                await group.delivery.ack()
            queue.batch.remove(group)
        log.error(
            "groups moved to the dead letters", groups=[g.event.group for g in groups], reason=reason, detail=detail
        )  # fmt: skip


def _trace_of(batch: Sequence[TrainingGroup]) -> dict[str, str]:
    """The trace headers of the first group that carries any: the step belongs to its trace."""
    for group in batch:
        headers = group.delivery.headers if group.delivery is not None else {}
        if "traceparent" in headers:
            return {k: v for k, v in headers.items() if k in ("traceparent", "tracestate")}
    return {}


async def train(config: Config, ready: Ready, process_group: ProcessGroup | None = None) -> None:
    """Train until every model has reached `trainer.max_steps`, or until cancelled if that is 0.

    `ready` is called once recovery is complete. `process_group` connects to the other processes that share the passes
    of a step. Raises `TrainerError` if the checkpoints on disk do not belong to the log."""
    scratch = config.path(config.trainer.checkpoints)
    user = "trainer" if config.trainer.branch == "main" else "experiment"
    async with Broker.connect(config.nats, name=user) as broker:
        learners = await anyio.to_thread.run_sync(make_learners, config, scratch, process_group)
        trainer = Trainer(config, broker, learners)
        spec = streams.trainer_consumer(config.trainer.branch)
        await broker.provision_consumer(spec)
        await trainer.recover()
        ready(step=max(q.step for q in trainer.queues.values()))
        async with broker.consume(spec) as consumption, anyio.create_task_group() as tg:
            tg.start_soon(trainer.intake, consumption)
            tg.start_soon(trainer.republish_after_reconnects)
            tg.start_soon(Retention(config, broker, learners).run)
            await trainer.run_steps()
            await trainer.until_redelivered(2 * spec.ack_wait_s)
            tg.cancel_scope.cancel()


async def serve(config: Config, ready: Ready, process_group: ProcessGroup | None = None) -> None:
    """Train until cancelled. After `trainer.max_steps` the service stays up idle, and new groups stay on the log."""
    await train(config, ready, process_group)
    log.info("training has ended: every model reached trainer.max_steps")
    await anyio.sleep_forever()
