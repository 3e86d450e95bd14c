"""Scored groups from the log into the queues of their models.

The intake takes `group.scored` events from the durable consumer `trainer`. It queues them by model in stream order,
publishes a discard for those that teach nothing (too old, equal rewards, members that infrastructure broke), and moves
those that fail in this trainer, as of a model that its settings don't name, to the dead letters, for the operator. The
service (`trainer.service`) runs it beside the steps, and calls `discard` and `dead_letter` for groups that turn out to
be untrainable later.

A group's place is its stream sequence and stream time. The sequence alone does not identify it: after a power cut the
server gives it to another event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import anyio
from anyio.to_thread import run_sync

from pipeline import streams
from pipeline.config import Config
from pipeline.events import DeadLettered, GroupScored, encode
from pipeline.log.broker import Broker, Consumption, Delivery
from pipeline.log.messages import Place
from pipeline.names import branch_model
from pipeline.telemetry.logs import get_logger
from trainer.batches.groups import AdmittedGroup, DiscardedGroup, Refusal, trainable_members
from trainer.batches.tasks import WINDOW, EarlierReturns, EarlierRuns
from trainer.checkpoints.commits import LogShrankError
from trainer.checkpoints.consumed import Consumed
from trainer.queues import ModelQueue
from trainer.recovery import unacknowledged_groups
from trainer.requested import batches_to_end

logger = get_logger("trainer")

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
        self._validation_counted_to = 0
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
            )
            await self._count_validation(queue, [r.event for r in scored if r.seq <= last_seq])
        self._validation_counted_to = last_seq
        self._redeliveries, groups = await unacknowledged_groups(self._broker, self.consumer, self.consumed)
        for recorded in groups:
            await self._admit(recorded.event, recorded.place, None)

    async def run(self, consumption: Consumption) -> None:
        """Queue the groups that are delivered. Runs until cancelled."""
        while True:
            for delivery in await self._broker.retry(partial(consumption.batch, 256), "groups were not delivered"):
                if isinstance(delivery.event, GroupScored):
                    await self._admit(delivery.event, delivery.place, delivery)
                else:
                    logger.warning("event skipped: it is not a scored group", subject=delivery.subject)
                    await delivery.ack()
                self._redeliveries -= delivery.deliveries > 1
            self._redelivered.set()
            await self._end_incomplete_batches()
            if len(self.consumed) > _CONSUMED_KEPT:
                await self._forget_acknowledged()

    async def _forget_acknowledged(self) -> None:
        """Drop what is remembered of groups up to the server's ack floor, because it delivers none of them again."""
        floor = await self._ack_floor()
        self.consumed.forget(floor)
        for queue in self.queues.values():
            for earlier_runs in queue.earlier_runs.values():
                earlier_runs.forget(floor)

    async def until_redelivered(self, timeout_s: float) -> None:
        """Wait until the server has redelivered the groups that a trainer before this one held, at most `timeout_s`
        seconds. The intake acknowledges those that are trained. A trainer that ended before that would leave them
        pending until its next start."""
        with anyio.move_on_after(timeout_s):
            while self._redeliveries > 0:
                self._redelivered = anyio.Event()
                await self._redelivered.wait()

    async def _admit(self, event: GroupScored, place: Place, delivery: Delivery | None) -> None:
        """Queue, discard or acknowledge a group that was delivered, or that was read at the start (`delivery` is
        `None`; it is delivered later)."""
        if 0 < place.seq <= self.consumed.floor:
            raise LogShrankError(
                f"the log lost its end: it delivers group {event.group} again, which was acknowledged. Start the "
                "trainer again: it reads the log anew"
            )
        self.newest = max(self.newest, place)
        group = AdmittedGroup(event, place, delivery)
        queue = self.queues.get(event.model) if event.project == self._config.project else None
        if place in self.consumed or not self._is_of_branch(event):
            if delivery is not None:
                await delivery.ack()
        elif event.project == self._config.project and any(t.name == event.model for t in self._config.outside):
            why = f"the outside model {event.model} answered: no token of these runs is a policy's (docs/gateway.md)"
            await self._publish_discard(event, Refusal("outside_model", why))
            await self._finish(group)
        elif queue is None:
            await self.dead_letter(
                group,
                "unknown_model",
                f"no model of this trainer is {event.model} of project {event.project}: after a start with that model, "
                "`journeywork dead retry` trains it",
            )
        elif (waiting := queue.find(event)) is not None:
            waiting.place, waiting.delivery = place, delivery
            waiting.earlier = await self._earlier_returns(queue, waiting.event, place.seq)
        else:
            await self._queue_or_discard(queue, group)

    def _is_of_branch(self, event: GroupScored) -> bool:
        """Whether a group is of the trained branch. Groups of other branches wait for a trainer of their own. Runs of
        versions `<model>+<branch>@<step>`, which evaluations play, are trained by none."""
        names_branch_version = any(event.model.startswith(branch_model(name, "")) for name in self.queues)
        return event.branch == self._config.trainer.branch and not names_branch_version

    async def _queue_or_discard(self, queue: ModelQueue, group: AdmittedGroup) -> None:
        """Queue a group that is new here, unless its event alone shows that it can't be trained."""
        event, seq = group.event, group.place.seq
        group.earlier = await self._earlier_returns(queue, event, seq)
        refusal = await self.consumed.refuse_repeated(event, self._broker)
        if refusal is None:
            if seq > self._validation_counted_to:  # those up to there were counted at the start
                await self._count_validation(queue, [event])
            refusal = group.refusal(queue.step, queue.settings_of(event.batch))
        if refusal is not None:
            await self.discard(queue, group, refusal)
        else:
            # After everything else that waits for the log: without a group, a batch can be ended meanwhile.
            await queue.requested.begin(event)
            queue.add(group)
            self.changed.set()

    async def _earlier_returns(self, queue: ModelQueue, event: GroupScored, seq: int) -> EarlierReturns:
        """Return the returns of the earlier runs of the group's task, or no returns if `trainer.loss.baseline` is not
        `task`. `seq`: stream sequence of the group's event.

        Adds the group to the queue's earlier runs, because later groups may be compared with it; a group that is
        delivered again is added once. The queue reads the earlier runs of a discount from the log when the first group
        with that discount comes."""
        by_discount = queue.earlier_runs
        loss = queue.settings_of(event.batch).loss
        compares_with_task, discount = loss.baseline == "task", loss.turn_discount
        if compares_with_task and discount not in by_discount:
            if len(by_discount) == _DISCOUNTS_KEPT:
                del by_discount[next(iter(by_discount))]  # the one asked for first; read again when it is needed
            by_discount[discount] = EarlierRuns(discount)
            for recorded in await self._broker.read(
                GroupScored,
                project=event.project,
                model=event.model,
                branch=event.branch,
                # `WINDOW` counts messages of the stream of groups. Each group that may still come, also again, lies
                # after the ack floor, so its window begins there at the earliest.
                start_seq=max(min(await self._ack_floor() + 1, seq) - WINDOW, 1),
            ):
                by_discount[discount].add(recorded.event, trainable_members(recorded.event), recorded.seq)
        for earlier_runs in by_discount.values():
            earlier_runs.add(event, trainable_members(event), seq)
        return by_discount[discount].before(event, seq) if compares_with_task else EarlierReturns()

    async def _ack_floor(self) -> int:
        """Return the stream sequence up to which every group is acknowledged, by the server's count."""
        info = await self._broker.consumer_info(self.consumer)
        return int(info.ack_floor.stream_seq) if info.ack_floor else 0

    async def _count_validation(self, queue: ModelQueue, groups: Sequence[GroupScored]) -> None:
        """Count the rewards of the groups' validation runs. Writes the best step to disk if it changed."""
        validation = queue.learner.validation
        if validation.record(groups) and validation.best is not None:
            await run_sync(queue.learner.checkpoints.set_best, validation.best)  # it waits for the disk

    async def discard(self, queue: ModelQueue, group: AdmittedGroup, refusal: Refusal) -> None:
        """Publish that a group is not trained and why, and acknowledge it."""
        event, duration_s = group.event, refusal.duration_s
        if refusal.reason == "stale" and duration_s is None:  # it shows whether long tasks starve
            result = await queue.histories.read(group)
            duration_s = result.duration_s if isinstance(result, Refusal) else result.history.duration_s
        await self._publish_discard(event, refusal, queue.learner.version, duration_s or 0.0)
        if refusal.reason != "repeated":  # its rewards were counted when it was trained
            rewards = [m.reward for m in group.members]
            queue.learner.discarded.append(DiscardedGroup(rewards, equal=refusal.reason == "no_variance"))
        queue.requested.settle(event)
        await self._finish(group)

    async def _publish_discard(
        self, event: GroupScored, refusal: Refusal, version: str = "", duration_s: float = 0.0
    ) -> None:
        """Publish that a group is not trained. `version`: the policy's at the discard, empty without
        one; `duration_s`: of the group's
        longest run, 0 if unknown."""
        await self._broker.publish(
            event.discarded(
                reason=refusal.reason, by="trainer", detail=refusal.detail, version=version, duration_s=duration_s
            )
        )
        logger.info("group discarded", group=event.group, reason=refusal.reason, detail=refusal.detail)

    async def dead_letter(self, group: AdmittedGroup, reason: str, detail: str) -> None:
        """Move a group that can't be trained to the dead letters, so that it is not delivered again."""
        event = group.event
        await self._broker.publish(
            DeadLettered(
                project="",
                stream=self.consumer.stream,
                stream_seq=group.place.seq,
                stream_at=group.place.at,
                original_subject=event.subject(),
                consumer=self.consumer.name,
                reason=reason,
                detail=detail,
                payload=encode(event),
            )
        )
        logger.error("group moved to the dead letters", group=event.group, reason=reason, detail=detail)
        await self._finish(group)

    async def _finish(self, group: AdmittedGroup) -> None:
        """Acknowledge a group that is not trained, and wake the step loop: the group's batch may be complete without
        it."""
        self.consumed.add(group.place)
        self.changed.set()
        if group.delivery is not None:
            await group.delivery.ack()

    # -- requested batches -----------------------------------------------------------------------------------------

    async def refuse_stale_batches(self, queue: ModelQueue) -> None:
        """Discard the groups of incomplete requested batches that can't be trained any more, as they became too old:
        their agent may have died before it completed the other groups."""
        for group in [group for batch in queue.requested.incomplete() for group in batch.groups]:
            if refusal := group.refusal(queue.step, queue.settings_of(group.event.batch)):
                await self.discard(queue, group, refusal)

    async def _end_incomplete_batches(self) -> None:
        """Discard the groups of incomplete requested batches that are to end (`trainer.requested.batches_to_end`).

        At most half of the groups that the log delivers without an acknowledgement may wait for others of their batch:
        with all of them, the log would deliver no more."""
        requested = {name: queue.requested for name, queue in self.queues.items()}
        for name, batch, why in batches_to_end(requested, self.consumer.max_ack_pending // 2):
            for group in list(batch.groups):  # a copy: `discard` takes the group out of the batch
                await self.discard(self.queues[name], group, Refusal("incomplete", why))
