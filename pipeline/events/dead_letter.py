"""The event of a message that no consumer could use, in stream DEAD.

Such a message must not hold up those behind it. It is copied into a *dead letter* with the reason, and acknowledged.
`journeywork dead` lists these letters, gives one back to the consumer that gave it up, or drops it."""

from __future__ import annotations

from pipeline.events.base import Event
from pipeline.events.types import Micros


class DeadLettered(Event, frozen=True, kw_only=True, tag="dead.letter"):
    """A message that a consumer could not process, with the reason. Consumers continue with the next message."""

    subject_fields = ("stream", "consumer")
    message_id_format = "dead/{0.stream}/{0.stream_seq}-{0.stream_at}/{0.consumer}"

    stream: str
    """Stream of the message."""
    stream_seq: int
    original_subject: str
    consumer: str
    """The consumer that gave it up; `reader`: a read without one."""
    reason: str
    """`undecodable`, `max_deliver`, `ended_service`, or a service's own."""
    detail: str = ""
    deliveries: int = 1
    payload: bytes = b""
    """The message, a claim check resolved."""
    headers: dict[str, str] = {}
    stream_at: Micros = 0
    """Stream time of the message: after a power cut, another message may have the number `stream_seq`. 0 in letters
    from before it was recorded."""

    @classmethod
    def subject_prefix(cls) -> str:
        """Return the first token of the subject, which is shorter than the tag: `dead.<stream>.<consumer>`."""
        return "dead"
