"""The trainer as a service: scored groups in, committed checkpoints out.

Three things run side by side. The intake takes `group.scored` events from the durable consumer `trainer`, discards
what can't train (and says so on the log) and queues the rest by model in stream order. The stepper waits until a model
has `trainer.groups_per_step` groups, fetches their exchanges, computes the step in a thread and commits it. The
broker's heartbeats keep every held group alive meanwhile.

The commit, in this order: checkpoint on disk, adapter in the object store, `policy.checkpoint` on the log, groups
acknowledged. A crash between any two of them is repaired at the next start by `recover`, which compares disk and log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial

import anyio
import anyio.to_thread

from pipeline import streams
from pipeline.config import Config
from pipeline.events import (
    CheckpointPublished,
    DeadLettered,
    GroupDiscarded,
    GroupScored,
    checkpoint_subject,
    encode,
)
from pipeline.log.broker import Broker, Consumption, Delivery, HistoryGoneError
from pipeline.log.place import Place, place_of
from pipeline.running.service import Ready
from pipeline.telemetry.logs import get_logger
from trainer.batches.groups import (
    Refusal,
    bound_staleness,
    prepare,
    refuse_by_event,
    staleness_bound,
    trainable_members,
)
from trainer.batches.histories import Histories
from trainer.batches.queues import Held, Queue
from trainer.checkpoints.commits import Commits
from trainer.checkpoints.consumed import Consumed
from trainer.checkpoints.retention import Retention
from trainer.engine.parallel import ProcessGroup
from trainer.engine.state import UntrainableError
from trainer.learner import BatchGroup, Learner, Taken, make_learners

log = get_logger("trainer")

_MEND_EVERY_S = 1.0


class Trainer:
    """See the module. `broker` must outlive it."""

    def __init__(self, config: Config, broker: Broker, learners: Mapping[str, Learner]) -> None:
        self.config, self.broker = config, broker
        self.queues = {name: Queue(learner, deque(), []) for name, learner in learners.items()}
        self._consumed = Consumed()
        self._news = anyio.Event()
        self._publishing = anyio.Lock()
        self.log = Commits(broker, config)
        self._histories = Histories(broker)

    # -- recovery ------------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Bring every model to its newest committed step and publish a checkpoint whose event never went out."""
        for name, queue in self.queues.items():
            subject = checkpoint_subject(self.config.project, name, branch=self.config.trainer.branch)
            published = [
                r.event
                for r in await self.broker.history("POLICY", subject)
                if isinstance(r.event, CheckpointPublished) and self.log.trusted(r.event)
            ]
            for event in published:
                self._consumed.checkpoint(event)
            last = max(published, key=lambda e: e.step, default=None)
            for manifest in await self.log.recover(queue.learner, last):
                self._consumed.checkpoint(manifest.event())
            log.info("resumed", model=name, step=queue.step, version=queue.learner.version)
        await self._take_over()

    async def _take_over(self) -> None:
        """Queue, from the log itself and in its order, what a dead predecessor held: its deliveries come back only
        after `ack_wait`, behind newer groups."""
        spec = streams.trainer_consumer(self.config.trainer.branch)
        info = await self.broker.consumer_info("GROUPS", spec.name)
        floor = int(info.ack_floor.stream_seq) if info.ack_floor else 0
        delivered = int(info.delivered.stream_seq) if info.delivered else 0
        if not info.num_ack_pending:
            return
        recent = await self.broker.history("GROUPS", "group.>", start_seq=floor + 1)
        discarded = {
            (r.event.branch, r.event.model, r.event.group)
            for r in recent
            # Some trajectories were too large; the group itself trains.
            if isinstance(r.event, GroupDiscarded)
            and r.event.by == "trainer"
            and r.event.reason != "too_large"
        }
        for recorded in recent:
            event = recorded.event
            if recorded.seq > delivered or not isinstance(event, GroupScored):
                continue
            if (event.branch, event.model, event.group) in discarded:
                self._consumed.add(place_of(recorded))
            await self._admit(event, place_of(recorded), None)

    async def mend(self) -> None:
        """For as long as the service runs: whenever the connection came back, see to it that the log still holds what was
        published. Its machine may have lost its power."""
        seen = self.broker.client.stats["reconnects"]
        while True:
            await anyio.sleep(_MEND_EVERY_S)
            now = self.broker.client.stats["reconnects"]
            if now == seen:
                continue
            for queue in self.queues.values():
                async with self._publishing:
                    await self.log.mend(queue.learner)
            seen = now

    # -- intake --------------------------------------------------------------------------------------------------

    async def intake(self, consumption: Consumption) -> None:
        """Queue what comes, for as long as the service runs."""
        while True:
            for delivery in await self.log.persist(partial(consumption.batch, 256)):
                if isinstance(delivery.event, GroupScored):
                    await self._admit(delivery.event, place_of(delivery), delivery)
                else:
                    log.warning("not a scored group", subject=delivery.subject)
                    await delivery.ack()

    async def _admit(self, event: GroupScored, place: Place, delivery: Delivery | None) -> None:
        if self._consumed.has(place, event.group):
            if delivery is not None:
                await delivery.ack()
            return
        queue = self.queues.get(event.model)
        if (
            queue is None
            or event.project != self.config.project
            or event.branch != self.config.trainer.branch
        ):
            log.warning(
                "not ours to train",
                group=event.group,
                model=event.model,
                project=event.project,
                branch=event.branch,
            )
            if delivery is not None:
                await delivery.ack()
            return
        for held in (*queue.waiting, *queue.batch):
            if held.event.subject() == event.subject():
                # The subject holds one event: at another place it is that event scored again, since the log lost the first.
                held.place, held.delivery = place, delivery
                return
        held = Held(event, place, delivery)
        if refusal := await self._repeated(event):
            await self._discard(queue, held, refusal)
            return
        queue.learner.validate(event)
        refusal = refuse_by_event(event, queue.step, staleness_bound(event, queue.settings))
        if refusal is not None:
            await self._discard(queue, held, refusal)
            return
        # A redelivery may come behind newer groups: the queue stays in stream order.
        index = len(queue.waiting)
        while index and queue.waiting[index - 1].place.seq > place.seq:
            index -= 1
        queue.waiting.insert(index, held)
        self._news.set()

    async def _repeated(self, event: GroupScored) -> Refusal | None:
        """A refusal of a group that trained already, where a power cut took its event from the log and the judge scored it
        again. A group whose first event is still there, or grew too old to be kept, is another one of that name."""
        before = self._consumed.trained(event.model, event.group)
        if before is None or not before.place.at:
            return None
        try:
            there = await self.broker.get("GROUPS", before.place.seq)
        except HistoryGoneError:
            state = (await self.broker.stream_info("GROUPS")).state
            if before.place.seq < state.first_seq:
                return None
        else:
            if place_of(there) == before.place:
                return None
        return Refusal(
            "repeated", f"{before.version} learned from this group; the log lost its first scoring"
        )

    async def _discard(self, queue: Queue, held: Held, refusal: Refusal) -> None:
        event = held.event
        if refusal.reason == "stale" and held.sequences is None:
            await self._histories.fetch(
                held, queue.learner
            )  # for how long its trajectories took: do long tasks starve?
        await self.broker.publish(
            GroupDiscarded(
                project=event.project, group=event.group, model=event.model,
                trajectories=tuple(m.trajectory for m in event.members), reason=refusal.reason, by="trainer", split=event.split,
                detail=refusal.detail, version=queue.learner.version, duration_s=held.duration_s,
                branch=event.branch,
            )
        )  # fmt: skip
        self._consumed.add(held.place)
        queue.learner.without_variance += refusal.reason == "no_variance"
        if refusal.reason != "repeated":  # those rewards were counted when the group trained
            queue.learner.untrained_rewards += [m.reward for m in trainable_members(event)]
        if held.delivery is not None:
            await held.delivery.ack()
        log.info("group discarded", group=event.group, reason=refusal.reason, detail=refusal.detail)

    # -- steps ---------------------------------------------------------------------------------------------------

    async def run_steps(self) -> None:
        """Steps for whichever model has waited longest with a full batch, until every model has reached `max_steps`."""
        while not self._finished():
            queue = self._next_queue()
            if queue is None:
                self._news = anyio.Event()
                await self._news.wait()
                continue
            if await self._fill(queue):
                await self._step(queue)

    def _finished(self) -> bool:
        return all(q.finished for q in self.queues.values())

    def _next_queue(self) -> Queue | None:
        ready = [q for q in self.queues.values() if q.full and not q.finished]
        return min(ready, key=lambda q: (q.step, (q.waiting or q.batch)[0].place.seq), default=None)

    async def _fill(self, queue: Queue) -> bool:
        """Move groups that train at the present step into the batch; False where too few were left."""
        settings = queue.settings
        while len(queue.batch) < settings.groups_per_step and queue.waiting:
            missing = settings.groups_per_step - len(queue.batch)
            candidates = [queue.waiting.popleft() for _ in range(min(missing, len(queue.waiting)))]
            queue.batch += candidates
            refusals = await self._histories.fetch_all(candidates, queue.learner)
            for held in candidates:
                if foreign := queue.learner.foreign_token(held.sequences or ()):
                    await self._bury(queue, [held], f"token {foreign} is not in the model's vocabulary")
                    continue
                refusal = refusals.get(held.place) or self._refuse(queue, held)
                if refusal is not None:
                    await self._discard(queue, held, refusal)
                    queue.batch.remove(held)
        return len(queue.batch) == settings.groups_per_step

    def _refuse(self, queue: Queue, held: Held) -> Refusal | None:
        bound = staleness_bound(held.event, queue.settings)
        refusal = refuse_by_event(held.event, queue.step, bound)
        if refusal is not None:
            return refusal
        assert held.sequences is not None
        kept, stale = bound_staleness(held.sequences, queue.step, bound)
        if kept:
            return None
        if stale:
            return Refusal("stale", f"all {stale} tokens are older than {bound} steps at step {queue.step}")
        why = "; ".join(f"{n} tokens were sampled under {what}" for what, n in held.left_out.items())
        return Refusal("no_variance", "no member has a token to train" + (f": {why}" if why else ""))

    async def _prefetch(self, queue: Queue) -> None:
        ahead = list(queue.waiting)[: queue.settings.groups_per_step]
        # What is gone is found again, and discarded, when its turn comes.
        await self._histories.fetch_all(ahead, queue.learner)

    async def _step(self, queue: Queue) -> None:
        learner = queue.learner
        batch = [
            BatchGroup(prepare(h.event, h.sequences or []), *h.place, h.left_out.total()) for h in queue.batch
        ]
        try:
            taken = await self._compute(queue, batch)
        except UntrainableError as error:
            await self._bury(queue, list(queue.batch), str(error), error.reason)
            return
        # Once the step is on disk, finish the commit even if a stop arrives: it is short, and recovery is longer.
        with anyio.CancelScope(shield=True):
            async with self._publishing:
                await self.log.mend(learner)  # first, so that the log has them in order
                await self.log.publish(taken.manifest, taken.adapter)
                await self.log.in_thread(learner.advance, taken)
            await self._tell_of_dropped(queue, taken)
            self._consumed.checkpoint(taken.manifest.event())
            for held in queue.batch:
                if held.delivery is not None:
                    await self.log.persist(partial(held.delivery.ack, confirmed=True))
            queue.batch = []
        log.info(
            "step", version=taken.manifest.version, batch=taken.manifest.batch_id,
            **{k: round(v, 6) for k, v in taken.manifest.metrics.items()},
        )  # fmt: skip

    async def _tell_of_dropped(self, queue: Queue, taken: Taken) -> None:
        """Say on the log which trajectories of the step's groups have a sequence that did not fit into memory."""
        for held in queue.batch:
            trajectories = taken.dropped.get(held.event.group, ())
            if trajectories:
                await self.broker.publish(
                    GroupDiscarded(
                        project=held.event.project, group=held.event.group, model=held.event.model, trajectories=trajectories,
                        reason="too_large", by="trainer", split=held.event.split, branch=held.event.branch,
                        version=taken.manifest.version, duration_s=held.duration_s,
                        detail="memory does not hold a pass of one of their sequences alone; the rest of the group was trained",
                    )
                )  # fmt: skip

    async def _compute(self, queue: Queue, batch: list[BatchGroup]) -> Taken:
        """The step, in its thread, while the next batch's exchanges are fetched."""
        error: UntrainableError | None = None
        async with anyio.create_task_group() as tg:
            tg.start_soon(self._prefetch, queue)
            try:
                return await self.log.in_thread(queue.learner.take, batch, _trace_of(queue.batch))
            except UntrainableError as caught:
                error = caught  # raised below: a task group would wrap it
        assert error is not None
        raise error

    async def _bury(self, queue: Queue, wanted: list[Held], detail: str, reason: str = "untrainable") -> None:
        """Groups that can't be trained must not come back for ever."""
        for held in wanted:
            await self.broker.publish(
                DeadLettered(
                    project="", stream="GROUPS", stream_seq=held.place.seq, stream_at=held.place.at,
                    original_subject=held.event.subject(), consumer="trainer", reason=reason, detail=detail,
                    payload=encode(held.event),
                )
            )  # fmt: skip
            self._consumed.add(held.place)
            if held.delivery is not None:
                await held.delivery.ack()
            queue.batch.remove(held)
        log.error("buried", groups=[h.event.group for h in wanted], reason=reason, detail=detail)


def _trace_of(batch: list[Held]) -> dict[str, str]:
    """The step belongs to the trace of the first group that carries one."""
    for held in batch:
        headers = held.delivery.headers if held.delivery is not None else {}
        if "traceparent" in headers:
            return {k: v for k, v in headers.items() if k in ("traceparent", "tracestate")}
    return {}


async def train(config: Config, ready: Ready, process_group: ProcessGroup | None = None) -> None:
    """Train until every model has reached `trainer.max_steps`, or for ever where that is 0."""
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
            tg.start_soon(trainer.mend)
            tg.start_soon(Retention(config, broker, learners).run)
            await trainer.run_steps()
            tg.cancel_scope.cancel()


async def serve(config: Config, ready: Ready, process_group: ProcessGroup | None = None) -> None:
    """Train until stopped; at `trainer.max_steps` further groups stay in the log for a later run."""
    await train(config, ready, process_group)
    log.info("max_steps reached")
    await anyio.sleep_forever()
