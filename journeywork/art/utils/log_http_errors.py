"""The body of a refused request in the log."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

import httpx

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("journeywork.art")


def log_http_errors(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Decorate a coroutine function: when it raises `httpx.HTTPStatusError`, the status and the body of the response
    are logged. The error is raised all the same."""

    @functools.wraps(function)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await function(*args, **kwargs)
        except httpx.HTTPStatusError as error:
            reply = error.response
            try:
                body = (await reply.aread()).decode("utf-8", "replace")
            except (httpx.StreamError, httpx.TransportError, RuntimeError):
                # It is closed, or of a synchronous client.
                body = "(its body was not read)"
            log.error(
                "%s %s answered %d: %s", reply.request.method, reply.request.url, reply.status_code, body
            )
            raise

    return wrapped
