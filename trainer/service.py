"""The trainer service: scored groups in, committed checkpoints out.

Five tasks run side by side. The intake queues the groups of each model (`trainer.intake`). The step loop waits until
a model has `trainer.groups_per_step` groups, reads their exchanges, computes the step in a thread and commits it.
Another one looks after every reconnect whether the log is whole, one removes what nothing needs any more
(`trainer.retention`), and one keeps the lease, by which one trainer at a time works on a branch. The broker's
heartbeats keep held groups from being redelivered meanwhile.

The way of a group: `judge.service` closes and scores it and publishes `group.scored`, which `trainer.intake` queues.
`trainer.batches.histories` reads its exchanges, `Learner.train_step` computes the step, and
`trainer.checkpoints.commits` publishes `policy.checkpoint`. `rollout_gateway.sampler.controller` sees that, loads the
adapter, probes it and publishes `policy.loaded`. From then on `rollout_gateway.serving.routing` resolves the model's
name to it, once enough servers hold it and unless a decision names another version.

A commit takes four steps: checkpoint on disk, adapter in the object store, `policy.checkpoint` on the log, groups
acknowledged. After a crash between any two of them, the next start compares disk and log and does the rest
(`trainer.recovery`). A log that lost its end in a power cut ends the trainer, so its next start repairs that, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import anyio
import msgspec
from anyio.to_thread import run_sync

from pipeline import streams
from pipeline.config import Config
from pipeline.log.broker import Broker
from pipeline.running.service import Ready
from pipeline.telemetry.logs import get_logger
from trainer.batches.groups import AdmittedGroup, GroupWithHistory, Refusal
from trainer.batches.histories import Histories
from trainer.checkpoints.commits import Commits, LogShrankError
from trainer.engine.late import LateRunsError
from trainer.engine.parallel import ProcessGroup
from trainer.engine.state import UntrainableError
from trainer.gpu_turns import GpuTurns
from trainer.intake import Intake
from trainer.learner import Learner, PendingStep, make_learners
from trainer.lease import Lease
from trainer.queues import ModelQueue
from trainer.recovery import catch_up
from trainer.requested import RequestedBatches
from trainer.retention import Retention

logger = get_logger("trainer")

_RECONNECT_CHECK_S = 1.0
"""Seconds between two checks of whether the connection to the log was made anew."""
_EXCHANGE_MEMORY_BYTES = 32 * 1024 * 1024
"""Limit on the exchanges that the broker keeps in memory: the trainer reads each trajectory's only once."""
_EMPTY_CHECK_S = 0.5
"""Seconds between two checks of whether a trainer that is to end (`until_empty`) has all groups."""


class Trainer:
    """Trains the models of `learners` from the groups on the log. `broker` must outlive it. Steps are computed in turns
    of `gpu`."""

    def __init__(self, config: Config, broker: Broker, learners: Mapping[str, Learner], gpu: GpuTurns) -> None:
        self.config, self.broker, self._gpu = config, broker, gpu
        consumer = streams.trainer_consumer(config.trainer.branch)
        self.queues = {
            name: ModelQueue(
                learner,
                Histories(broker, learner.settings, learner.sampling_defaults, learner.prompts, config.may_train),
                RequestedBatches(broker, consumer.name, learner.settings.batch_timeout_s),
            )
            for name, learner in learners.items()
        }
        self.commits = Commits(broker, config)
        self.intake = Intake(config, broker, self.queues)

    # -- start and log -------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Bring every model to its newest committed step, and queue the groups that wait for the next ones."""
        state = (await self.broker.stream_info(self.intake.consumer.stream)).state
        for name, queue in self.queues.items():
            published = await catch_up(self.commits, queue.learner)
            for event in published:
                self.intake.consumed.add_checkpoint(event, state.first_seq)
            if self.config.trainer.branch != "main":
                # A branch shares the versions of `main` up to the one that it was forked from, whose address,
                # `<lake>#<branch>/<model>@<step>`, is the source of its first checkpoint. Others share the base model.
                first = min(published, key=lambda event: event.step, default=None)
                queue.histories.shared_until = first.step if first is not None and "#" in first.source else 0
            logger.info("resumed", model=name, step=queue.step, version=queue.learner.version)
        await self.intake.catch_up(state.last_seq)

    async def require_whole_log(self) -> None:
        """Raise `LogShrankError` if the log lost its end: the newest group that was read, or a committed step."""
        stream, newest = self.intake.consumer.stream, self.intake.newest
        if newest.seq and not await self.broker.has_reached(stream, newest):
            raise LogShrankError(
                f"the log lost its end: message {newest.seq} of {stream} is gone. Start the trainer again: it reads "
                "the log anew"
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

    # -- steps ---------------------------------------------------------------------------------------------------

    async def run_steps(self, until_empty: bool = False) -> None:
        """Train until every model has reached `max_steps`; with `until_empty`, also until no group on the log is left
        that makes a step full. Of the models with enough groups, the one with the fewest steps is next."""
        while not all(q.finished for q in self.queues.values()):
            queue = self._next_queue()
            if queue is None:
                self.intake.changed = anyio.Event()  # before the question to the log: a group may come meanwhile
                if until_empty and await self._has_all_groups():
                    return
                with anyio.move_on_after(_EMPTY_CHECK_S if until_empty else None):
                    await self.intake.changed.wait()
                continue
            if await self._fill_batch(queue):
                await self._step(queue)

    async def _has_all_groups(self) -> bool:
        """Whether the groups that wait here are all that the log has to deliver."""
        info = await self.broker.consumer_info(self.intake.consumer)
        waiting = sum(1 for queue in self.queues.values() for _ in queue.groups())
        return not info.num_pending and int(info.num_ack_pending or 0) <= waiting

    def _next_queue(self) -> ModelQueue | None:
        """The queue of the model to train next; `None` if no model has groups for a step."""
        ready = [q for q in self.queues.values() if q.full and not q.finished]
        return min(ready, key=lambda q: q.step, default=None)

    async def _fill_batch(self, queue: ModelQueue) -> bool:
        """Move groups that can train at the current step into the batch. Returns whether the batch can be trained: one
        of `trainer.groups_per_step` groups is full, and a requested one, which comes first, has a group left."""
        if queue.take_requested():
            await self._move_candidates(queue)
            return bool(queue.batch.groups)
        queue.batch.request = None
        full = queue.settings.groups_per_step
        while len(queue.batch.groups) < full and queue.take_waiting():
            await self._move_candidates(queue)
        return len(queue.batch.groups) == full

    async def _move_candidates(self, queue: ModelQueue) -> None:
        """Move the candidates that can train at the current step into the batch, and discard the others."""
        queue.batch.groups += await self._trainable(queue, await queue.read_candidates())
        queue.candidates = []

    async def _trainable(
        self, queue: ModelQueue, groups: Sequence[tuple[AdmittedGroup, GroupWithHistory | Refusal]]
    ) -> list[GroupWithHistory]:
        """Return the groups that can train at the current step, with stale tokens as context. The others are discarded,
        or moved to the dead letters."""
        settings = queue.settings_of(queue.batch.request)
        trainable = []
        for admitted, group in groups:
            if isinstance(group, GroupWithHistory):
                # Decoding images takes a while.
                if reason := await run_sync(queue.learner.why_unusable, group.sequences):
                    await self.intake.dead_letter(admitted, "untrainable", reason)
                    queue.drop(admitted)
                    continue
                group = group.refusal(queue.step, settings) or group.within_staleness(queue.step, settings)
            if isinstance(group, Refusal):
                await self.intake.discard(queue, admitted, group)
                queue.drop(admitted)
            else:
                trainable.append(group)
        return trainable

    async def _step(self, queue: ModelQueue) -> None:
        """Train the batch and commit the step. If the batch can't be trained, the groups at fault are taken out of it;
        the others wait for more groups, or are trained at once if the batch was requested."""
        # A group that the log lost and that was scored again may be in the batch.
        await self.require_whole_log()
        try:
            pending = await self._compute(queue)
        except UntrainableError as error:
            if isinstance(error, LateRunsError):
                await self._refuse_late(queue, str(error))
            else:
                await self._remove_faulty(queue, error)
            if queue.batch.request is not None and queue.batch.groups:
                await self._step(queue)
            return
        # The step is on disk. Finish the commit even if the service is stopped: that is faster than a recovery.
        with anyio.CancelScope(shield=True):
            await self._commit(queue, pending)
            await self.intake.refuse_stale_batches(queue)

    async def _commit(self, queue: ModelQueue, pending: PendingStep) -> None:
        """Publish a step that is on disk, make it the learner's current one, and acknowledge its groups."""
        learner, event = queue.learner, pending.manifest.event
        # So that the log holds the steps in order.
        await self.commits.require_on_log(learner.model.name, queue.step)
        await self.commits.publish(pending.manifest, pending.files)
        await run_sync(learner.make_current, pending)
        for group in queue.batch.groups:
            self.intake.consumed.add(group.admitted.place)
            if group.admitted.delivery is not None:
                acknowledge = partial(group.admitted.delivery.ack, confirmed=True)
                await self.broker.retry(acknowledge, "a group was not acknowledged")
        queue.batch.groups = []
        metrics = {k: round(v, 6) for k, v in event.metrics.items()}
        logger.info("step", version=event.version, batch=event.batch_id, **metrics)

    async def _compute(self, queue: ModelQueue) -> PendingStep:
        """Compute the step in a thread, and read the exchanges of the next batch meanwhile."""
        error: UntrainableError | None = None
        async with anyio.create_task_group() as tg:
            tg.start_soon(queue.read_next)
            try:
                async with self._gpu.turn():
                    return await run_sync(queue.learner.train_step, queue.batch.groups, queue.batch.request)
            except UntrainableError as untrainable:
                error = untrainable  # raised below, as a task group would wrap it
        assert error is not None
        raise error

    async def _refuse_late(self, queue: ModelQueue, why: str) -> None:
        """Make the late tokens of the batch context, because their correction was refused for the reason `why`. Groups
        without another token to train are discarded."""
        late = queue.learner.late_groups(queue.batch.groups, queue.batch.request)
        groups = [replace(g, late_refused=why) if g in late else g for g in queue.batch.groups]
        queue.batch.groups = await self._trainable(queue, [(g.admitted, g) for g in groups])

    async def _remove_faulty(self, queue: ModelQueue, error: UntrainableError) -> None:
        """Move the groups that made their batch fail by `error` to the dead letters: those that can't be trained alone,
        or all groups if each can be trained alone."""
        batch = queue.batch
        reasons = dict.fromkeys(batch.groups, str(error))
        if len(batch.groups) > 1:
            async with self._gpu.turn():
                untrainable_alone = await run_sync(queue.learner.untrainable_alone, batch.groups, batch.request)
            reasons = untrainable_alone or reasons
        for group, detail in reasons.items():
            batch.groups.remove(group)
            await self.intake.dead_letter(group.admitted, error.reason, detail)


def user_of(config: Config) -> str:
    """Return the NATS user that may publish checkpoints of the configured branch."""
    return "trainer" if config.trainer.branch == "main" else "experiment"


async def train(
    config: Config, ready: Ready, process_group: ProcessGroup | None = None, *, until_empty: bool = False
) -> None:
    """Train until every model has reached `trainer.max_steps`, or until cancelled if that is 0. With `until_empty`,
    training also ends once the log has no more groups for a full step.

    `ready` is called once recovery is complete. `process_group` connects to the other processes that share the passes
    of a step. Raises `TrainerError` if disk and log do not belong together; `LogShrankError`, in a group."""
    remembered = min(config.nats.exchange_memory_bytes, _EXCHANGE_MEMORY_BYTES)
    nats = msgspec.structs.replace(config.nats, exchange_memory_bytes=remembered)
    async with Broker.connect(nats, name=user_of(config)) as broker, aclosing(GpuTurns(config)) as gpu:
        async with gpu.turn():
            learners = await run_sync(make_learners, config, process_group)
            gpu.add(learner.engine.model for learner in learners.values())
        with Lease(broker, config, user_of(config)) as lease:
            if not await lease.take():
                logger.warning("another trainer trains this branch: this one waits until it ends")
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
    """Train as `train` describes, with the lease taken, which `lease.keep` renews meanwhile."""
    config, broker = trainer.config, trainer.broker
    spec = trainer.intake.consumer
    await broker.provision_consumer(spec)
    await trainer.recover()
    ready(step=max(q.step for q in trainer.queues.values()))
    try:
        async with broker.consume(spec) as consumption, anyio.create_task_group() as tg:
            tg.start_soon(lease.keep)
            tg.start_soon(trainer.intake.run, consumption)
            tg.start_soon(trainer.watch_log)
            tg.start_soon(Retention(config, broker, learners).run)
            await trainer.run_steps(until_empty)
            await trainer.intake.until_redelivered(2 * spec.ack_wait_s)
            tg.cancel_scope.cancel()
    except* LogShrankError:
        logger.error("the log lost its end: the trainer ends, and reads it anew at its next start")
        raise


async def serve(config: Config, ready: Ready, process_group: ProcessGroup | None = None) -> None:
    """Train until cancelled. After `trainer.max_steps` the service stays up idle, and new groups stay on the log."""
    await train(config, ready, process_group)
    logger.info("training has ended: every model reached trainer.max_steps")
    await anyio.sleep_forever()
