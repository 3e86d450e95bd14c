"""Calls to the log that are repeated while it is unavailable.

A server that restarts, a cluster that elects a leader and a message that another writer is storing at this moment all
answer with an error, or not at all. Each of them is over in milliseconds to seconds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import nats.errors
import nats.js.errors

from pipeline.concurrency.backoff import Backoff
from pipeline.errors import BrokerUnavailableError

T = TypeVar("T")

_RETRYABLE_CODES = frozenset(
    {
        10005,  # no suitable peers: a node is away
        10006,  # the cluster has no leader yet
        10007,  # not assigned yet
        10009,  # the node that answered is no longer the leader
        10041,  # Raft: no quorum, or a leader stepped down
        10118,  # the stream's nodes are away
        10119,  # the consumer's nodes are away
        10158,  # a replicated stream is storing another publish of the same message id
        10164,  # a replicated stream is storing another publish on the same subject
        10167,  # too many requests at this moment
    }
)
_RETRYABLE = (
    TimeoutError,  # also that of nats-py
    BrokerUnavailableError,
    nats.errors.NoRespondersError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.OutboundBufferLimitError,
    nats.errors.StaleConnectionError,
    nats.js.errors.NoStreamResponseError,
)


def is_retryable(error: BaseException) -> bool:
    """Return whether the same call may succeed in a moment: the server is away, or its cluster elects a leader."""
    if not isinstance(error, nats.js.errors.APIError):
        return isinstance(error, _RETRYABLE)
    # nats-py gives no code where no server answers.
    return error.code in (503, None) or error.err_code in _RETRYABLE_CODES


async def retry_while_unavailable(call: Callable[[], Awaitable[T]], what: str, deadline_s: float) -> T:
    """Return the result of `call`, which is repeated with growing pauses while its error `is_retryable`.

    `what` begins the error's sentence, such as "a read of POLICY was not answered". The last try may end after the
    deadline of `deadline_s` seconds. Raises `BrokerUnavailableError` after the deadline, any other error at once."""
    backoff, end = Backoff(), anyio.current_time() + deadline_s
    while True:
        try:
            return await call()
        except (nats.errors.Error, TimeoutError, BrokerUnavailableError) as error:
            if not is_retryable(error):
                raise
            if anyio.current_time() >= end:
                raise BrokerUnavailableError(
                    f"{what} within {deadline_s:.0f} s ({reason(error)}): is the NATS server up, its cluster in "
                    "quorum and its disk not full?"
                ) from error
        await backoff.wait()


def reason(error: BaseException) -> str:
    """Return the error's text, or its class name where it has none, as with many errors of nats-py."""
    return str(error) or type(error).__name__
