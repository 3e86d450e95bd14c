"""Scored groups from the log into the queues of their models.

The intake takes `group.scored` events from the durable consumer `trainer`. It queues them by model in stream order,
publishes a discard for those that can't train, and moves those that no trainer with these settings can train to the
dead letters.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial

import anyio
from anyio.to_thread import run_sync

from pipeline import streams
from pipeline.config import Config
from pipeline.events import DeadLettered, GroupDiscarded, GroupScored, encode
from pipeline.log.broker import Broker, Consumption, Delivery
from pipeline.log.messages import Place
from pipeline.names import branch_model
from pipeline.telemetry.logs import get_logger
from trainer.batches.groups import Refusal, TrainingGroup, trainable_members
from trainer.batches.tasks import WINDOW, EarlierRuns
from trainer.checkpoints.commits import LogShrankError
from trainer.checkpoints.consumed import Consumed
from trainer.queues import ModelQueue, RequestedBatch
from trainer.recovery import unacknowledged

log = get_logger("trainer")

_CONSUMED_KEPT = 10_000
"""With more places of consumed groups in memory, those that the server has acknowledged are dropped."""

_DISCOUNTS_KEPT = 4
"""A model's earlier runs are kept for so many discounts. Batches may ask for any number, and each costs memory."""


class Intake:
    """Takes in the groups of the models in `queues`. `broker` must outlive it."""

    def __init__(self, config: Config, broker: Broker, queues: Mapping[str, ModelQueue]) -> None:
        self._config, self._broker, self.queues = config, broker, queues
        self.consumer = streams.trainer_consumer(config.trainer.branch)
        self.consumed = Consumed()
        self.newest = Place(0, 0)
        """The newest group that was delivered, or was read at the start."""
        self._validated_to = 0
        """The validation groups up to this sequence were counted at the start."""
        self._redeliveries = 0
        """How many messages that a trainer before this one held the server still has to deliver again."""
        self._redelivered = anyio.Event()
        self.changed = anyio.Event()
        """Set when a group was queued, or taken out of the queues. Replace it before you wait for it."""

    async def catch_up(self, last_seq: int) -> None:
        """Count the validation runs that the log holds up to `last_seq`, and queue the groups that a trainer before
        this one held."""
        for name, queue in self.queues.items():
            scored = await self._broker.read(
                GroupScored, project=self._config.project, model=name, branch=self._config.trainer.branch, split="val"
            )  # fmt: skip
            await self._record_validation(queue, [r.event for r in scored if r.seq <= last_seq])
        self._validated_to = last_seq
        self._redeliveries, groups = await unacknowledged(self._broker, self.consumer, self.consumed)
        for recorded in groups:
            await self._admit(recorded.event, recorded.place, None)

    async def run(self, consumption: Consumption) -> None:
        """Queue the groups that are delivered. Runs until cancelled."""
        while True:
            for delivery in await self._broker.retry(
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
            if len(self.consumed) > _CONSUMED_KEPT:
                floor = await self._ack_floor()
                self.consumed.forget(floor)
                for queue in self.queues.values():
                    for earlier_runs in queue.earlier_runs.values():
                        earlier_runs.forget(floor)

    async def until_redelivered(self, timeout_s: float) -> None:
        """Wait until the server delivered again what a trainer before this one held, at most `timeout_s` seconds. The
        intake acknowledges what is trained already. Without this, a trainer that resumes and soon reaches `max_steps`
        would leave such groups pending until its next start."""
        with anyio.move_on_after(timeout_s):
            while self._redeliveries > 0:
                self._redelivered = anyio.Event()
                await self._redelivered.wait()

    async def _admit(self, event: GroupScored, place: Place, delivery: Delivery | None) -> None:
        if 0 < place.seq <= self.consumed.floor:
            raise LogShrankError(
                f"the log lost its end: it delivers group {event.group} again, which was acknowledged. Start the "
                "trainer again: it reads the log anew"
            )
        self.newest = max(self.newest, place)
        # Groups of other branches wait for a trainer of their own. Runs of a branch's versions, which evaluations play,
        # are trained by none.
        of_branch = any(event.model.startswith(branch_model(name, "")) for name in self.queues)
        if place in self.consumed or event.branch != self._config.trainer.branch or of_branch:
            if delivery is not None:
                await delivery.ack()
            return
        group = TrainingGroup(event, place, delivery)
        queue = self.queues.get(event.model)
        of_project = event.project == self._config.project
        if of_project and any(table.name == event.model for table in self._config.outside):
            why = f"the outside model {event.model} answered: no token of these runs is a policy's (docs/gateway.md)"
            await self._publish_discard(group, Refusal("outside_model", why))
            await self._finish(group)
            return
        if queue is None or not of_project:
            await self.dead_letter(
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
                await self._attach_earlier_runs(queue, waiting)
                return
        await queue.begin_requested(event, self._broker, self.consumer.name)
        await self._attach_earlier_runs(queue, group)
        refusal = await self.consumed.refuse_repeated(event, self._broker)
        if refusal is None:
            if place.seq > self._validated_to:
                await self._record_validation(queue, [event])
            refusal = group.refusal(queue.step, queue.settings_of(event.batch))
        if refusal is not None:
            await self.discard(queue, group, refusal)
            return
        queue.add(group)
        self.changed.set()

    async def _attach_earlier_runs(self, queue: ModelQueue, group: TrainingGroup) -> None:
        """Set `group.earlier`, if its step compares runs with the earlier runs of their task.

        The queue's earlier runs are read from the log when the first group asks for those of its discount. Every group
        is added to them, because later ones may be compared with it; one that is delivered again changes nothing."""
        event, seq, kept = group.event, group.place.seq, queue.earlier_runs
        loss = queue.settings_of(event.batch).loss
        asked, discount = loss.baseline == "task", loss.turn_discount
        if asked and discount not in kept:
            if len(kept) == _DISCOUNTS_KEPT:
                del kept[next(iter(kept))]
            kept[discount] = EarlierRuns(discount)
            for recorded in await self._broker.read(
                GroupScored, project=event.project, model=event.model, branch=event.branch,
                # A group that is not acknowledged may come again: begin a window before the oldest of them.
                start_seq=max(min(await self._ack_floor() + 1, seq) - WINDOW, 1),
            ):  # fmt: skip
                kept[discount].add(recorded.event, trainable_members(recorded.event), recorded.seq)
        for earlier_runs in kept.values():
            earlier_runs.add(event, group.members, seq)
        if asked:
            group.earlier = kept[discount].before(event, seq)

    async def _ack_floor(self) -> int:
        """The sequence up to which the server knows every acknowledgement."""
        info = await self._broker.consumer_info(self.consumer)
        return int(info.ack_floor.stream_seq) if info.ack_floor else 0

    async def _record_validation(self, queue: ModelQueue, groups: Sequence[GroupScored]) -> None:
        validation = queue.learner.validation
        if validation.record(groups) and validation.best is not None:
            await run_sync(queue.learner.checkpoints.set_best, validation.best)  # it waits for the disk

    async def discard(self, queue: ModelQueue, group: TrainingGroup, refusal: Refusal) -> None:
        """Publish that a group is not trained and why, and acknowledge it."""
        event = group.event
        if refusal.reason == "stale" and group.sequences is None:
            await queue.histories.read(group)  # sets `duration_s`, which shows whether long tasks starve
        await self._publish_discard(group, refusal, queue.learner.version)
        if refusal.reason != "repeated":  # its rewards were counted when it was trained
            rewards = [m.reward for m in group.members]
            queue.learner.record_discarded(rewards, equal=refusal.reason == "no_variance")
        queue.settle(event)
        await self._finish(group)

    async def _publish_discard(self, group: TrainingGroup, refusal: Refusal, version: str = "") -> None:
        event = group.event
        await self._broker.publish(
            GroupDiscarded(
                project=event.project, group=event.group, model=event.model,
                trajectories=tuple(m.trajectory for m in event.members), reason=refusal.reason, by="trainer",
                split=event.split, detail=refusal.detail, version=version, duration_s=group.duration_s,
                branch=event.branch, owner=event.owner, judge=event.judge,
            )
        )  # fmt: skip
        log.info("group discarded", group=event.group, reason=refusal.reason, detail=refusal.detail)

    async def dead_letter(self, group: TrainingGroup, reason: str, detail: str) -> None:
        """Move a group that can't be trained to the dead letters, so that it is not delivered again."""
        event = group.event
        await self._broker.publish(
            DeadLettered(
                project="", stream=self.consumer.stream, stream_seq=group.place.seq, stream_at=group.place.at,
                original_subject=event.subject(), consumer=self.consumer.name, reason=reason, detail=detail,
                payload=encode(event),
            )
        )  # fmt: skip
        log.error("group moved to the dead letters", group=event.group, reason=reason, detail=detail)
        await self._finish(group)

    async def _finish(self, group: TrainingGroup) -> None:
        """Acknowledge a group that is not trained. Its batch may be complete without it."""
        self.consumed.add(group.place)
        self.changed.set()
        if group.delivery is not None:
            await group.delivery.ack()

    # -- requested batches -----------------------------------------------------------------------------------------

    async def refuse_stale_batches(self, queue: ModelQueue) -> None:
        """Discard the groups of incomplete requested batches that became too old. Their agent may have died before it
        completed the others."""
        for group in [group for batch in queue.incomplete() for group in batch.groups]:
            if refusal := group.refusal(queue.step, queue.settings_of(group.event.batch)):
                await self.discard(queue, group, refusal)

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
        bound = self.consumer.max_ack_pending // 2
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
            await self.discard(queue, group, Refusal("incomplete", why))
