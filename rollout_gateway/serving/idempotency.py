"""Requests that carry an idempotency id, by which a client can safely repeat them: the log keeps the first one (the id
is part of the event's message id), a repetition changes nothing, and a different request with the same id is refused.
Decisions, feedback and evaluations are such requests."""

from __future__ import annotations

import msgspec

from pipeline.events import Event
from pipeline.log.broker import Broker
from pipeline.log.fast_client import Ack
from rollout_gateway.http.errors import ApiError


async def publish_once(broker: Broker, event: Event, param: str, value: str = "") -> Ack:
    """Publish `event`, unless it was recorded before. Return its acknowledgement.

    `param`: the field of the request that holds the idempotency id, which is `value` or the event's field of that
    name. Raises a 409 `ApiError` if the log holds a different event with this id; `event` was not recorded then. Events
    that differ only in `at` count as equal."""
    ack = await broker.publish(event)
    if not ack.duplicate:
        return ack
    refuse_different(event, (await broker.read_at(type(event), ack.seq)).event, param, value)
    return ack


def refuse_different(event: Event, stored: Event, param: str, value: str = "") -> None:
    """Raise a 409 `ApiError` if `event`, which the caller has not recorded, differs from the `stored` one of the same
    idempotency id in more than `at`. `param`, `value`: as in `publish_once`."""
    if msgspec.structs.replace(event, at=stored.at) != stored:
        message = (
            f"Nothing was recorded: an earlier request with other contents used the same `{param}`, "
            f"{value or getattr(event, param)!r}. Send the contents of the earlier request to repeat it, or send a new "
            "id."
        )
        raise ApiError(409, "request_exists", message, param=param)
