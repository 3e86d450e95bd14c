"""The judge service: consumes completed trajectories, publishes scored groups.

It keeps no groups in memory. Arrivals are completed trajectories and signals (what was said about a run). When one is
delivered, it reads the group's messages from the log. The message that makes the group ready (`judge.groups`) is
acknowledged after the log has acknowledged the group's `group.scored` or `group.discarded`; all others are acknowledged
at once. Therefore any number of processes can share the durable consumer: the process that gets this delivery scores
the group, and if it dies, the delivery goes to another one. The deadlines of a group, to be full and to have its
feedback, are timers of the NATS server, which delivers each to one process like a trajectory.

Each group has its own subject, limited to one message, so the broker rejects a second score. If a group's event is
already on the log, the judge keeps it, and records the group's trajectories that are missing from it as late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.abc

from judge.comparing import ShadowJudge, open_answer_ruler
from judge.feedback import counted_signals
from judge.group_log import WRONG_EVENT_DELAY_S, GroupLog, feedback_names, has_own_subject
from judge.groups import Group, GroupKey, GroupOnLog, key_of
from judge.healing import open_healer
from judge.labelled import read_labelled
from judge.limits import Budget
from judge.monitor import JudgeMonitor
from judge.rewards.compose import ConfiguredComposer, open_composer, open_composer_on_log
from judge.ruler.asking import no_log
from judge.scoring import AskTeacher, judge_hash, score_closed
from judge.teacher import open_teacher
from pipeline import crash
from pipeline.concurrency.concurrently import concurrently
from pipeline.config import Config
from pipeline.events import (
    FeedbackTimedOut,
    GroupDiscarded,
    GroupScored,
    GroupTimedOut,
    SignalGiven,
    TrajectoryCompleted,
    now_us,
)
from pipeline.log.broker import Broker, Consumption, Delivery
from pipeline.log.consumer import handling
from pipeline.running.service import Ready
from pipeline.streams import RETRY_HEADER, consumer
from pipeline.telemetry.logs import get_logger

logger = get_logger("judge")

_BATCH = 512
"""Most deliveries that are taken at once."""
_WAIT_S = 1.0
"""How long a batch, or a free place, is waited for before it is looked at again."""
_READS = 32
"""Number of groups that are read from the log concurrently."""
_SCORING = 256
"""Number of groups that a process scores concurrently if they need no judge model."""
_MAX_SCORING = 1024
"""About the most groups in memory, including those whose judge model does not answer; other groups stay on the log.
It can be exceeded by some hundreds: completions and timers are taken for the same room, and for each group as many
deliveries as it has runs, which may be of as many groups."""
_TIMER_REDELIVERIES, _SCORING_ACK_WAITS = 3, 6
"""If the timer of a group is due and the group is ready but not scored, the timer is delivered again up to 3 times,
each time after 6 times the ack wait. So is a signal that comes while its group is scored."""


def check(config: Config) -> None:
    """Raise `ConfigError` for settings with which `serve` would not start. Reward functions are imported."""

    async def compose() -> None:
        async with open_composer(config, no_log):
            pass

    if config.judge.anchors.file:
        read_labelled(Path(config.judge.anchors.file))
    anyio.run(compose)


async def serve(config: Config, ready: Ready) -> None:
    """Run the service until it is cancelled."""
    judge_id = judge_hash(config.judge)
    answer_ruler = await open_answer_ruler(config)
    async with (
        Broker.connect(config.nats, name="judge") as broker,
        open_composer_on_log(config, broker) as composer,
        open_teacher(config, broker) as teacher,
        open_healer(config, broker, answer_ruler) as healer,
        broker.consume("judge") as arrivals,
        broker.consume("judge-timers") as timers,
        broker.consume("judge-shadows") as shadows,
    ):
        file = config.judge.anchors.file
        anchors = read_labelled(Path(file)) if file else []
        async with anyio.create_task_group() as tg:
            if composer is not None:
                monitor = JudgeMonitor(
                    config.judge, composer.judges, anchors, broker.publish, project=config.project, judge=judge_id
                )
                tg.start_soon(monitor.run)
            tg.start_soon(ShadowJudge(broker, config, answer_ruler).run, shadows)
            ready()
            await Judge(broker, config, composer, judge_id, teacher, healer).run(arrivals, timers)


class Judge:
    """Scores groups. Any number of processes may run one."""

    def __init__(
        self,
        broker: Broker,
        config: Config,
        composer: ConfiguredComposer | None,
        judge_id: str,
        teach: AskTeacher | None = None,
        heal: Callable[[GroupScored], Awaitable[GroupScored]] | None = None,
    ) -> None:
        """`composer`: scores groups with a judge model or composed rewards; `None` if only agents' rewards are used.
        `judge_id`: hash of the judge configuration. `teach`: asks a teacher from outside, `heal` adds corrections to a
        scored group; `None` if there is none."""
        self._broker, self._config, self._composer = broker, config.judge, composer
        self._judge_id, self._teach, self._heal = judge_id, teach, heal
        self._budget = Budget(broker, config)
        self._log = GroupLog(broker, config.judge, config.feedback)
        self._late_feedback = feedback_names(config.judge) if config.feedback.late == "train" else frozenset[str]()
        """Names of the feedback that leads to the scoring of a discarded group if it comes late."""
        self._scoring: dict[GroupKey, list[Delivery]] = {}
        """The groups being scored, with the deliveries that closed them (several after a redelivery)."""
        self._tasks: anyio.abc.TaskGroup
        """Exists only while `run` runs."""
        self._scoring_ended = anyio.Event()
        """Set, and replaced by a new event, when the scoring of a group ends and leaves room for another."""

    async def run(self, arrivals: Consumption, timers: Consumption) -> None:
        """Consume until cancelled; `arrivals` are completions and signals. An exception ends the process;
        unacknowledged deliveries are redelivered."""
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._consume, arrivals, self._config.group_size, self._on_arrivals)
            self._tasks.start_soon(self._consume, timers, 1, lambda due: concurrently(self._on_timer, due, _READS))

    async def _consume(
        self, messages: Consumption, per_group: int, handle: Callable[[list[Delivery]], Awaitable[object]]
    ) -> None:
        """Pass deliveries to `handle` in batches while more groups can be scored. `per_group`: about how many
        deliveries a group has. It only decides how many are taken at once."""
        while True:
            while (free := self._free_places()) <= 0:
                # Looked at again after a while: a group that pauses frees its place without setting the event.
                with anyio.move_on_after(_WAIT_S):
                    await self._scoring_ended.wait()
            await handle(await messages.batch(min(free * per_group, _BATCH), _WAIT_S))

    def _free_places(self) -> int:
        """Return how many more groups this process should begin to score; others stay on the log for other processes.
        Groups that pause before they are judged again take no place. 0 if less than a quarter of the places is free, so
        that deliveries are taken in batches."""
        scoring = len(self._scoring)
        at_once, paused = _SCORING, 0
        if self._composer is not None:
            at_once, paused = min(self._composer.at_once, _SCORING), self._composer.paused
        free = min(at_once - (scoring - paused), _MAX_SCORING - scoring)
        return free if free >= at_once // 4 else 0

    async def _on_arrivals(self, batch: list[Delivery]) -> None:
        """Handle completions and signals, those of one group together. Other events, and those on a subject that is not
        their own, are given back."""
        by_group: dict[GroupKey, list[Delivery]] = defaultdict(list)
        for delivery in batch:
            event = delivery.event
            if isinstance(event, TrajectoryCompleted | SignalGiven) and has_own_subject(delivery, event):
                by_group[key_of(event)].append(delivery)
            else:
                await delivery.give_back(WRONG_EVENT_DELAY_S)

        await concurrently(self._on_arrivals_of, list(by_group.items()), _READS)

    async def _on_arrivals_of(self, arrived: tuple[GroupKey, list[Delivery]]) -> None:
        """Handle completions and signals of one group: begin to score the group if one of them made it ready, record
        late trajectories, and set the group's deadline if its first completion is among them. Acknowledge all but the
        one that made the group ready, which `_score` acknowledges, and signals after that (`_on_later_signal`)."""
        key, deliveries = arrived
        with handling(deliveries):
            deliveries.sort(key=lambda delivery: delivery.seq)
            while (state := await self._log.read(key, deliveries[-1].place)) is None:
                await deliveries.pop().ack()  # the log has deleted the newest one since: try with the one before
                if not deliveries:
                    return
            if late := [state.late[d.seq] for d in deliveries if d.seq in state.late]:
                await self._log.record_late(late, (await self._log.read_end(key)).trajectories)
            first = next((d.place for d in deliveries if d.seq == state.first), None)
            if first is not None and not state.closed_at:
                await self._log.set_deadline(key, first)
            for delivery in deliveries:
                if await self._makes_ready(state, delivery):
                    self._begin_scoring(state.group, delivery)
                elif 0 < state.ready_at < delivery.seq and isinstance(delivery.event, SignalGiven):
                    await self._on_later_signal(key, delivery)
                else:
                    if delivery.seq == state.closed_at and not state.ready_at:
                        await self._log.set_feedback_deadline(key, delivery.place.at)
                    await delivery.ack()

    async def _makes_ready(self, state: GroupOnLog, delivery: Delivery) -> bool:
        """Return whether the group is to be scored because of this delivery: it made the group ready, or it is a
        retried dead letter, which may have done so, and the group was neither scored nor discarded."""
        if RETRY_HEADER in delivery.headers and state.ready_at:
            return not (await self._log.read_end(state.group.key)).ended
        return delivery.seq == state.ready_at

    async def _on_later_signal(self, key: GroupKey, delivery: Delivery) -> None:
        """Handle a signal that came after its group was ready. If the group was discarded for want of a reward and this
        signal may give it one (`feedback.late`), the group is scored again; if it is being scored, the signal waits."""
        signal = delivery.event
        assert isinstance(signal, SignalGiven)
        may_give_reward = signal.kind == "number" and signal.call < 0 and signal.name in self._late_feedback
        end = await self._log.read_end(key) if may_give_reward and counted_signals([signal], self._config) else None
        if end is None or end.scored:
            await delivery.ack()
        elif not end.ended or key in self._scoring:
            await delivery.give_back(_SCORING_ACK_WAITS * consumer("judge").ack_wait_s)
        elif (state := await self._log.read(key, delivery.place, later=True)) is None:
            await delivery.ack()
        else:
            self._begin_scoring(replace(state.group, again=True), delivery)

    async def _on_timer(self, delivery: Delivery) -> None:
        """Handle a timer that is due: record that the group's time to become full, or to get feedback, is over, and
        begin to score the group if that makes it ready. Nothing is done for one that was scored or discarded."""
        event = delivery.event
        with handling([delivery]):
            if not isinstance(event, GroupTimedOut | FeedbackTimedOut):
                await delivery.give_back(WRONG_EVENT_DELAY_S)
                return
            key = key_of(event)
            if key in self._scoring or (await self._log.read_end(key)).ended:
                await delivery.ack()
                return
            place = await self._log.record_timeout(event)
            state = await self._log.read(key, place)
            if state is None or not state.group.members:  # retention has deleted its trajectories
                logger.warning("group not scored: the log no longer holds its runs", group=key.group, model=key.model)
                await delivery.ack()
            elif not state.ready_at:
                await self._log.set_feedback_deadline(key, now_us())
                await delivery.ack()
            elif state.ready_at != place.seq and delivery.deliveries <= _TIMER_REDELIVERIES:
                # The message that made the group ready is being handled, or waits in a backlog. If it was acknowledged
                # under other settings, by which the group was not ready, only this timer makes a process score it.
                await delivery.give_back(_SCORING_ACK_WAITS * consumer("judge").ack_wait_s)
            else:
                self._begin_scoring(state.group, delivery)

    def _begin_scoring(self, group: Group, delivery: Delivery) -> None:
        """Score a group in a task of its own, unless it is being scored already. `delivery` is acknowledged when the
        group's event is on the log."""
        if (deliveries := self._scoring.get(group.key)) is not None:
            deliveries.append(delivery)
            return
        self._scoring[group.key] = [delivery]
        self._tasks.start_soon(self._score, group)

    async def _score(self, group: Group) -> None:
        """Score a closed group and publish its event, unless one is on the log already (a discard does
        not count if the group is scored again). Then record as late the members
        that the event on the log does not list, and acknowledge the deliveries that made the group ready."""
        key = group.key
        with handling(self._scoring[key]):
            if group.closed_by == "size" or self._log.waits_for_feedback:
                await self._log.cancel_deadline(key)
            end = await self._log.read_end(key)
            is_over = end.scored or (end.ended and not group.again)
            recorded = end.trajectories if is_over else await self._publish_end(group)
            await self._log.record_late(group.members, recorded)
            for delivery in self._scoring.pop(key):
                await delivery.ack()
            self._scoring_ended.set()
            self._scoring_ended = anyio.Event()

    async def _publish_end(self, group: Group) -> frozenset[str]:
        """Score a group and publish the result. Return the trajectories in the group's event on the log, which is
        another process's if that one was published first."""
        over_budget = await self._budget.refusal(group.key.group)
        event = await score_closed(
            group, self._config, self._judge_id, self._composer, self._teach, over_budget=over_budget
        )
        if self._heal is not None and isinstance(event, GroupScored):
            event = await self._heal(event)
        crash.point("judge.before_publish")
        if isinstance(event, GroupDiscarded):
            if group.again:
                return group.trajectories  # it stays discarded as before
            # Unlike `group.scored`, its subject accepts any number of events, so check for another process's event
            # first.
            if (end := await self._log.read_end(group.key)).ended:
                return end.trajectories
            logger.info("group discarded", group=event.group, reason=event.reason, detail=event.detail)
        ack = await self._broker.publish(event)
        crash.point("judge.after_publish")
        return (await self._log.read_end(group.key)).trajectories if ack.duplicate else group.trajectories
