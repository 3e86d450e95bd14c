"""Requests that name an idempotency id: the log keeps the first, and another request under its id is refused."""

from __future__ import annotations

import msgspec

from pipeline.events import Event
from pipeline.log.broker import Broker
from pipeline.log.fast_client import Ack
from rollout_gateway.http.errors import ApiError


async def check_repeat(broker: Broker, event: Event, ack: Ack, param: str) -> None:
    """Check the acknowledgement of `event`. `param` names the field of the request that holds its idempotency id.

    Raises a 409 `ApiError` if the log holds another event under this id, so that `event` was not recorded. An event
    that differs only in its time is the same one."""
    if not ack.duplicate:
        return
    stored = (await broker.read_at(type(event), ack.seq)).event
    if msgspec.structs.replace(event, at=stored.at) != stored:
        message = (
            f"Nothing was recorded: `{param}` {getattr(event, param)!r} was used before by a request with other "
            "contents. Send the contents of the first request to repeat it, or a new id to record something else."
        )
        raise ApiError(409, "request_exists", message, param=param)
