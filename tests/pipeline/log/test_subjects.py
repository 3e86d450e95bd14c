"""A typed read uses exactly the subjects that events are published to."""

from typing import Any

import msgspec
import pytest

from pipeline import streams
from pipeline.events import (
    EVENTS,
    CheckpointPublished,
    DeadLettered,
    Event,
    ExchangeRecorded,
    FeedbackTimedOut,
    GroupDiscarded,
    GroupScored,
    GroupTimedOut,
    PolicyRetired,
    TrajectoryCompleted,
    wire_name,
)
from pipeline.log.subjects import keys_of, stream_of, subject_filter


def made(cls: type[Event], **fields: Any) -> Event:
    """An event whose required fields are names that a subject has to escape, or numbers."""
    required = [f for f in msgspec.structs.fields(cls) if f.required]
    values = {"step": 7, "stream": "ROLLOUTS"}
    return cls(**{f.name: values.get(f.name, "a.b") for f in required} | fields)


PUBLISHED_TO = {
    "rollout.group": "N.N.N",
    "rollout.opened": "N.N",
    "rollout.exchange": "N.N",
    "rollout.completed": "N.N.N.N",
    "rollout.timeout": "N.N.N",
    "rollout.overdue": "N.N.N",
    "rollout.signal": "N.N.N.N.N",
    "rollout.teacher": "N.N.N",
    "rollout.shadow": "N.N.N",
    "rollout.compared": "N.N.N",
    "group.scored": "N.N.N.N.main",
    "group.discarded": "N.N.N.main",
    "group.measured": "N.N.N",
    "group.admitted": "N.N",
    "policy.checkpoint": "N.N.7",
    "policy.loaded": "N.N",
    "policy.unloaded": "N.N",
    "policy.retired": "N.N",
    "policy.promoted": "N.N",
    "policy.evaluated": "N.N.N",
    "policy.alarm": "N.N",
    "policy.erased": "N.N",
    "policy.what_if": "N.N",
    "dead.letter": "N",
}
"""Tag to the rest of the subject; N is an escaped name. Logs hold such subjects: change none."""


OPTIONAL = {
    GroupScored: {"split": "val"},
    GroupTimedOut: {"split": "val"},
    FeedbackTimedOut: {"split": "val"},
    CheckpointPublished: {"branch": "other.one"},
}


@pytest.mark.parametrize("cls", EVENTS, ids=lambda cls: cls.__name__)
def test_subjects_stay_and_keys_of_an_event_give_them(cls: type[Event]) -> None:
    tag = wire_name(cls)
    prefix = "dead.ROLLOUTS" if tag == "dead.letter" else tag
    subjects = {f"{prefix}.{PUBLISHED_TO[tag].replace('N', 'a%2Eb')}": made(cls)}
    for last in OPTIONAL.get(cls, {}).values():
        subjects |= {f"{subject}.{last.replace('.', '%2E')}": made(cls, **OPTIONAL[cls]) for subject in subjects}
    for subject, event in subjects.items():
        assert event.subject() == subject == subject_filter(cls, **keys_of(event))
        assert stream_of(cls) == streams.stream_of_subject(subject)


@pytest.mark.parametrize(
    ("cls", "keys", "subject"),
    [
        (ExchangeRecorded, {}, "rollout.exchange.>"),
        (ExchangeRecorded, {"project": "p"}, "rollout.exchange.p.>"),
        (ExchangeRecorded, {"project": "p", "trajectory": "t.1"}, "rollout.exchange.p.t%2E1"),
        (TrajectoryCompleted, {"project": "p", "trajectory": "t"}, "rollout.completed.p.*.*.t"),
        (TrajectoryCompleted, {"project": "p", "model": "m", "group_key": "g"}, "rollout.completed.p.m.g.>"),
        (GroupTimedOut, {"project": "p", "model": "m", "group": "g"}, "rollout.timeout.p.m.g"),
        (GroupDiscarded, {"project": "p", "model": "m", "group": "g"}, "group.discarded.p.m.g.>"),
        (CheckpointPublished, {"project": "p", "model": "m"}, "policy.checkpoint.p.m.>"),
        (CheckpointPublished, {"project": "p", "model": "m", "branch": "main"}, "policy.checkpoint.p.m.*"),
        (CheckpointPublished, {"project": "p", "model": "m", "branch": "b"}, "policy.checkpoint.p.m.*.b"),
        (CheckpointPublished, {"project": "p", "model": "m", "step": 3}, "policy.checkpoint.p.m.3"),
        (PolicyRetired, {"project": "p", "model": "m"}, "policy.retired.p.m"),
        (DeadLettered, {}, "dead.>"),
    ],
)
def test_keys_that_are_left_out_match_anything(cls: type[Event], keys: dict[str, Any], subject: str) -> None:
    assert subject_filter(cls, **keys) == subject


def test_a_key_that_is_not_in_the_subject_is_refused() -> None:
    with pytest.raises(TypeError, match=r"rollout\.exchange has no group"):
        subject_filter(ExchangeRecorded, group="g")


@pytest.mark.parametrize(
    ("group", "key"),
    [("g", "g"), ("", "t"), ("two\nlines", "hashed-edc8c1284585"), ("x" * 201, "hashed-"), ("\ud800", "hashed-")],
)
def test_every_group_id_has_a_name_that_a_subject_can_hold(group: str, key: str) -> None:
    event = TrajectoryCompleted(project="p", trajectory="t", model="m", group=group)
    assert event.group_key.startswith(key)
    assert (event.group_key == key) == (not key.startswith("hashed"))
    assert event.subject() == f"rollout.completed.p.m.{event.group_key}.t"
