"""What every event carries.

An *event* is an immutable record on the log: an agent's call, a score, a trained version. Its *tag*, such as
`rollout.opened`, says which class it is. Its *subject* is the tag and the values of some fields, such as
`rollout.opened.<project>.<trajectory>`; the log finds events by it."""

from __future__ import annotations

import time
from typing import ClassVar

import msgspec

from pipeline.events.types import Micros
from pipeline.names import subject_token


def now_us() -> int:
    """Return the current time in microseconds since the Unix epoch."""
    return time.time_ns() // 1000


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What every event carries."""

    subject_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that follow the tag in the event's subject."""
    last_subject_field: ClassVar[tuple[str, str]] = ("", "")
    """A field that ends the subject unless it has this value."""
    unique_subject: ClassVar[bool] = False
    """Whether the subject holds one event only, for ever: the broker refuses a second one, also after the
    deduplication window. Such an event is identified by its subject."""
    message_id_format: ClassVar[str] = ""
    """Format of the event's identity, in which `{0.name}` is its field `name`. Two events on one subject must differ in
    it, and a retry must not. Empty: the subject."""

    project: str
    """Namespace."""
    at: Micros = msgspec.field(default_factory=now_us)
    """Time at which the event was created."""
    v: int = 1
    """Schema version of this class when it was written."""

    @classmethod
    def subject_prefix(cls) -> str:
        """Return the first tokens of the subject: the event's tag."""
        return str(cls.__struct_config__.tag)

    def subject(self) -> str:
        """Return the NATS subject that the event is published to."""
        tokens = [subject_token(str(getattr(self, name))) for name in self.subject_fields]
        last, default = self.last_subject_field
        if last and getattr(self, last) != default:
            tokens.append(subject_token(getattr(self, last)))
        return ".".join((self.subject_prefix(), *tokens))

    def message_id(self) -> str:
        """Return the event's identity, which is the same for every retry of a publish: its subject, unless the subject
        holds several events. It is the `Nats-Msg-Id` of a publish without a condition."""
        return self.message_id_format.format(self) or self.subject()
