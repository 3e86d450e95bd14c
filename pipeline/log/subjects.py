"""Event classes to stream and subject: what a typed read asks the server for.

A *subject* is a message's address, with dots between its tokens: `rollout.exchange.<project>.<trajectory>`. In a filter
`*` stands for any one token, and `>` at the end for any number of them."""

from __future__ import annotations

from typing import Any

from pipeline import streams
from pipeline.events import Event, wire_name
from pipeline.names import subject_token


def stream_of(event: type[Event]) -> str:
    """Return the name of the stream that holds events of a class."""
    return streams.stream_of_subject(wire_name(event))


def subject_filter(event: type[Event], **keys: str | int) -> str:
    """Return the subject of events of a class, with wildcards for the fields that `keys` does not name.

    The optional last field (`branch` of a checkpoint, `split` of a group) matches any value if it is not named,
    unless all other fields are: then it stands for `main` or `train`. Raises `TypeError` for a field that is not part
    of the subject."""
    names, (last, default) = event.subject_fields, event.last_subject_field
    if unknown := keys.keys() - {*names, last}:
        raise TypeError(f"the subject of {wire_name(event)} has no {', '.join(sorted(unknown))}; it has {names}")
    tokens = [subject_token(str(keys[name])) if name in keys else "*" for name in names]
    if last in keys:
        tokens += [subject_token(str(keys[last]))] if keys[last] != default else []
    elif tokens[-1] == "*":  # ">" stands for all of these, and for the optional last field
        while tokens and tokens[-1] == "*":
            tokens.pop()
        tokens.append(">")
    return ".".join((event.subject_prefix(), *tokens))


def keys_of(event: Event) -> dict[str, Any]:
    """Return the fields that are part of the subject of `event`, as the `keys` of `subject_filter` and of reads."""
    names = (*event.subject_fields, event.last_subject_field[0])
    return {name: getattr(event, name) for name in names if name}
