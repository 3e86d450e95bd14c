"""What every event carries."""

from __future__ import annotations

import time
from typing import ClassVar

import msgspec

from pipeline.events.types import Micros


def now_us() -> int:
    """The present as `Micros`."""
    return time.time_ns() // 1000


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What every event carries."""

    unique_subject: ClassVar[bool] = False
    """The subject may hold one event only, ever: the broker refuses a second one whatever the deduplication window
    says. Such an event's subject names its identity."""

    project: str
    at: Micros = msgspec.field(default_factory=now_us)
    """When the event was made."""
    v: int = 1
    """Schema version of this class when it was written."""

    def subject(self) -> str:
        raise NotImplementedError(type(self).__name__)  # pragma: no cover - every event below defines it

    def message_id(self) -> str:
        """`Nats-Msg-Id`: the same for every retry of the same fact."""
        raise NotImplementedError(type(self).__name__)  # pragma: no cover
