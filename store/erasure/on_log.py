"""Overwrites a person's messages on the log, and the objects of those that are too large for it.

JetStream overwrites a message that is deleted by its sequence with random bytes. Messages that retention removed before
are no longer addressed (docs/store.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import msgspec

from pipeline import crash
from pipeline.errors import HistoryGoneError
from pipeline.events import EVENTS, ClaimCheck, DeadLettered, Event, GroupDiscarded, GroupScored, decode
from pipeline.log import objects
from pipeline.log.broker import Broker
from pipeline.log.messages import StoredMessage
from pipeline.log.subjects import stream_of, subject_filter
from pipeline.names import subject_token
from store.erasure.plan import Plan


async def messages_of(broker: Broker, project: str, plan: Plan) -> AsyncGenerator[tuple[str, StoredMessage], None]:
    """Yield stream and message of all that the log holds of the plan's runs: their own events, the scored groups that
    they are in, and dead letters of either."""
    for event, names in _events_of(plan):
        subject = subject_filter(event, project=project, **names)
        # The subject of a dead letter that was delivered again has one more token.
        for pattern in (subject, f"{subject}.*") if subject[-1] != ">" else (subject,):
            async with aclosing(broker.messages(stream_of(event), subject=pattern)) as messages:
                async for message in messages:
                    yield stream_of(event), message
    is_of_plan = SubjectsOfPlan(project, plan)
    async with aclosing(broker.messages(stream_of(DeadLettered))) as messages:
        async for message in messages:
            try:
                letter = await broker.event_of(decode(message.payload))
            except (msgspec.DecodeError, HistoryGoneError):
                continue  # what it held is gone, as after an erasure that was killed between object and message
            if isinstance(letter, DeadLettered) and is_of_plan(letter.original_subject):
                yield stream_of(DeadLettered), message


def _events_of(plan: Plan) -> Iterator[tuple[type[Event], dict[str, str]]]:
    """Yield the classes of events about the plan's runs and groups, with the fields that name each of these."""
    for run in plan.runs:
        yield from ((event, {"trajectory": run}) for event in EVENTS if "trajectory" in event.subject_fields)
    for group in plan.groups:
        yield GroupScored, {"model": group.model, "group": group.group}


class SubjectsOfPlan:
    """The subjects of a plan's messages: an object of it is called with a subject, and returns whether this is that of
    an event about one of the runs (`rollout.<kind>.<project>.….<run>`), or of one of the scored groups
    (`group.scored.<project>.<model>.<group>`)."""

    def __init__(self, project: str, plan: Plan) -> None:
        self._project = subject_token(project)
        self._runs = {subject_token(run) for run in plan.runs}
        self._groups = {(subject_token(g.model), subject_token(g.group)) for g in plan.groups}

    def __call__(self, subject: str) -> bool:
        family, *tokens = subject.split(".")
        project, *names = tokens[1:] or [""]
        if project != self._project:
            return False
        return not self._runs.isdisjoint(names) if family == "rollout" else (*names[:2],) in self._groups


async def count(broker: Broker, project: str, plan: Plan) -> None:
    """Set the plan's numbers of messages and objects to what the log holds."""
    messages: Counter[str] = Counter()
    plan.objects = 0
    async for stream, message in messages_of(broker, project, plan):
        messages[stream] += 1
        plan.objects += _claim_of(message) is not None
    plan.messages = dict(messages)


async def erase(broker: Broker, project: str, plan: Plan) -> None:
    """Overwrite all that the log holds of the plan's runs. May be called again."""
    for model, group, runs in plan.untrained:
        discarded = GroupDiscarded(
            project=project, group=group, model=model, trajectories=tuple(runs), reason="history_gone", by="erase"
        )
        await broker.publish(discarded)
    async with aclosing(messages_of(broker, project, plan)) as messages:
        async for stream, message in messages:
            claim = _claim_of(message)
            if claim is not None:
                await objects.erase(broker, claim.bucket, claim.object)
            await broker.delete(stream, message.seq)
            crash.point("erase.message_deleted")


def _claim_of(message: StoredMessage) -> ClaimCheck | None:
    """Return the claim check in a message whose event is in the object store, because it is too large for the log;
    `None` for any other message."""
    try:
        form = decode(message.payload)
    except msgspec.DecodeError:
        return None
    return form if isinstance(form, ClaimCheck) else None
