"""Event classes to stream and subject: what a typed read asks the server for."""

from __future__ import annotations

from typing import Any

from pipeline import streams
from pipeline.events import (
    CheckpointPublished,
    DeadLettered,
    Event,
    ExchangeRecorded,
    GroupDiscarded,
    GroupScored,
    JudgeMeasured,
    PolicyLoaded,
    PolicyPromoted,
    PolicyRetired,
    PolicyUnloaded,
    TrajectoryCompleted,
    TrajectoryOpened,
    wire_name,
)
from pipeline.names import subject_token

_KEYS: dict[type[Event], tuple[str, ...]] = {
    TrajectoryOpened: ("project", "trajectory"),
    ExchangeRecorded: ("project", "trajectory"),
    TrajectoryCompleted: ("project", "model", "trajectory"),
    GroupScored: ("project", "model", "group", "judge", "branch"),
    GroupDiscarded: ("project", "model", "group", "branch"),
    JudgeMeasured: ("project", "ruler", "kind"),
    CheckpointPublished: ("project", "model", "step"),
    PolicyLoaded: ("project", "model"),
    PolicyUnloaded: ("project", "model"),
    PolicyRetired: ("project", "model"),
    PolicyPromoted: ("project", "model"),
    DeadLettered: ("stream", "consumer"),
}
"""The fields in a subject, in its order. `tests/pipeline/log/test_subjects.py` compares them with what each event publishes to."""
_OPTIONAL: dict[type[Event], tuple[str, str]] = {
    GroupScored: ("split", "train"),
    CheckpointPublished: ("branch", "main"),
}
"""The field that ends the subject unless it has this value."""


def stream_of(event: type[Event]) -> str:
    """Return the name of the stream that holds events of a class."""
    return streams.stream_of(wire_name(event))


def subject_filter(event: type[Event], **keys: str | int) -> str:
    """Return the subject, with wildcards where `keys` does not name a field, of events of a class.

    `branch` of a checkpoint and `split` of a group match any value if they are not given, unless all other fields are:
    then they stand for `main` and `train`. Raises `TypeError` for a key that is not part of the subject."""
    names = _KEYS[event]
    optional, default = _OPTIONAL.get(event, ("", ""))
    if unknown := keys.keys() - {*names, optional}:
        raise TypeError(
            f"the subject of {wire_name(event)} has no {', '.join(sorted(unknown))}; it has {names}"
        )
    tokens = [subject_token(str(keys[name])) if name in keys else "*" for name in names]
    if optional in keys:
        tokens += [subject_token(str(keys[optional]))] if keys[optional] != default else []
    elif tokens[-1] == "*":
        while tokens and tokens[-1] == "*":
            tokens.pop()
        tokens.append(">")
    prefix = "dead" if event is DeadLettered else wire_name(event)
    return ".".join((prefix, *tokens))


def keys_of(event: Event) -> dict[str, Any]:
    """Return the keys that give the subject of `event`."""
    optional = _OPTIONAL.get(type(event), ("", ""))[0]
    return {name: getattr(event, name) for name in (*_KEYS[type(event)], optional) if name}
