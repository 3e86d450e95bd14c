"""Events to MessagePack and back.

Every event is a MessagePack map with its tag under `type`. Packed columns (`list<int32>` and the like) travel as
little-endian bytes and are lists in Parquet. To keep old logs readable, a new field has a default, a field never
changes its meaning or type, and a tag is never used again. Readers skip unknown fields.

What lies on a stream is an event, a `ClaimCheck` in place of an event that is too large for a message, or a
`Continuation` in place of an exchange that repeats an earlier one. `pipeline.log` resolves both; nobody else sees
them."""

from __future__ import annotations

import msgspec

from pipeline.events import alarm, dead_letter, evaluation, group, policy, rollout, shadow, signal
from pipeline.events.base import Event
from pipeline.events.continuation import Continuation


class ClaimCheck(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="claim"):
    """Replaces an event that is larger than the server's payload limit. The event is in the object store."""

    object: str
    """Name of the object."""
    sha256: str
    size: int
    """Bytes of the stored event."""
    event: str
    """Tag of the stored event. Empty: the bytes are no event."""
    bucket: str = "CLAIMS"
    """Bucket of the object."""


AnyEvent = (
    rollout.GroupOpened
    | rollout.TrajectoryOpened
    | rollout.ExchangeRecorded
    | rollout.TrajectoryCompleted
    | signal.SignalGiven
    | signal.TeacherAnswered
    | shadow.ShadowAnswered
    | shadow.AnswersCompared
    | rollout.GroupTimedOut
    | rollout.FeedbackTimedOut
    | group.GroupScored
    | group.GroupDiscarded
    | group.GroupAdmitted
    | group.JudgeMeasured
    | policy.CheckpointPublished
    | policy.PolicyLoaded
    | policy.PolicyUnloaded
    | policy.PolicyRetired
    | policy.PolicyPromoted
    | evaluation.PolicyEvaluated
    | policy.DataErased
    | evaluation.WhatIfAnswered
    | alarm.AlarmChanged
    | dead_letter.DeadLettered
)

EVENTS: tuple[type[Event], ...] = AnyEvent.__args__
"""Every event class, in the order of a trajectory's life."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyEvent | ClaimCheck | Continuation] = msgspec.msgpack.Decoder(
    AnyEvent | ClaimCheck | Continuation
)


def wire_name(event: type[Event] | Event) -> str:
    """Return the tag of an event or an event class, such as `rollout.exchange`."""
    cls = event if isinstance(event, type) else type(event)
    return str(cls.__struct_config__.tag)


def encode(event: Event | ClaimCheck | Continuation) -> bytes:
    """Return a message's payload."""
    return _encoder.encode(event)


def decode(payload: bytes) -> AnyEvent | ClaimCheck | Continuation:
    """Decode a message. Raises `msgspec.DecodeError` (or its `ValidationError`) if it is no known event, or if a
    packed array has an impossible length, so that readers can unpack arrays without a check."""
    event = _decoder.decode(payload)
    exchange = event.exchange if isinstance(event, Continuation) else event
    if isinstance(exchange, rollout.ExchangeRecorded):
        # Logprobs and masks may differ in length from the tokens. The trainer then ignores them.
        # One test for the usual case, in which all are fine; `_check_packed` names the wrong one.
        if (len(exchange.prompt_ids) | len(exchange.sampled_ids) | len(exchange.logprobs)) % 4:
            _check_packed(exchange, ("prompt_ids", "sampled_ids", "logprobs"), 4)
    elif isinstance(event, policy.CheckpointPublished):
        _check_packed(event, ("group_seqs", "group_times"), 8)
        seqs, times = len(event.group_seqs) // 8, len(event.group_times) // 8
        if seqs not in (0, len(event.groups)) or times not in (0, seqs):
            raise msgspec.ValidationError(
                f"{len(event.groups)} groups with {seqs} sequences and {times} stream times: "
                "the numbers must be equal - at `$.group_seqs`"
            )
    return event


def decode_error(payload: bytes) -> str:
    """Return why a payload is neither an event nor a claim check; empty if it is one."""
    try:
        decode(payload)
    except msgspec.DecodeError as error:
        return str(error) or "undecodable"
    return ""


def _check_packed(event: Event, fields: tuple[str, ...], size: int) -> None:
    """Raise `ValidationError` unless these packed arrays hold whole values of `size` bytes."""
    for name in fields:
        if (length := len(getattr(event, name))) % size:
            raise msgspec.ValidationError(
                f"a packed array of {length} bytes, which is no multiple of {size} - at `$.{name}`"
            )
