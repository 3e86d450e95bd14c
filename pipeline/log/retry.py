"""Asking the log again: which failures pass by themselves, and how long to wait between two tries.

A server that restarts, a cluster that elects a leader and a message that another writer is storing at this moment all answer with
an error, or not at all. Each of them is over in milliseconds to seconds. `patiently` repeats a call until then, with growing
pauses, and gives up at a deadline (`nats.publish_deadline_s` for the calls of this package).
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import nats.errors
import nats.js.errors

from pipeline.errors import BrokerUnavailableError

T = TypeVar("T")

FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 0.5

IN_PROCESS = frozenset({10158, 10164})
"""Another publish of the same message id, or on the same subject, is being stored: the answer is known in a moment.
Only a replicated stream says so."""

_AGAIN = IN_PROCESS | frozenset(
    {
        10005,  # no suitable peers: a node is away
        10006,  # the cluster has no leader yet
        10007,  # not assigned yet
        10009,  # the node that answered leads no longer
        10041,  # Raft: no quorum, or a leader stepped down
        10118,  # the stream's nodes are away
        10119,  # the consumer's nodes are away
        10167,  # too many requests at this moment
    }
)


def passes(error: BaseException) -> bool:
    """Whether the same call may succeed in a moment: the server is away, or its cluster elects a leader."""
    if isinstance(error, nats.js.errors.APIError):
        if error.err_code is None and error.code == 409:  # a pull request, not an answer of the API
            return "deleted" not in (error.description or "").lower()
        return (
            error.code in (503, None) or error.err_code in _AGAIN
        )  # nats-py gives no code where nobody answers
    return isinstance(
        error,
        (
            TimeoutError,
            BrokerUnavailableError,
            nats.errors.TimeoutError,
            nats.errors.NoRespondersError,
            nats.errors.ConnectionReconnectingError,
            nats.errors.OutboundBufferLimitError,
            nats.errors.StaleConnectionError,
            nats.js.errors.NoStreamResponseError,
        ),
    )


class Pause:
    """Growing pauses with jitter, so that many callers don't ask in step."""

    def __init__(self, first_s: float = FIRST_PAUSE_S, longest_s: float = LONGEST_PAUSE_S) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._next_s = first_s

    async def wait(self) -> None:
        seconds = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, self._longest_s)
        await anyio.sleep(seconds)

    def reset(self) -> None:
        """The call succeeded: begin with the shortest pause again."""
        self._next_s = self._first_s


async def patiently(call: Callable[[], Awaitable[T]], what: str, deadline_s: float) -> T:
    """The result of `call`, repeated while its failure is one that passes (`passes`).

    `what` begins the error's sentence, such as "a read of POLICY was not answered". The last try may end after the deadline
    of `deadline_s` seconds. Raises `BrokerUnavailableError` then; any other failure at once."""
    pause, end = Pause(), anyio.current_time() + deadline_s
    while True:
        try:
            return await call()
        except (nats.errors.Error, TimeoutError, BrokerUnavailableError) as error:
            if not passes(error):
                raise
            if anyio.current_time() >= end:
                raise BrokerUnavailableError(
                    f"{what} within {deadline_s:.0f} s ({reason(error)}): is the NATS server up, its cluster in "
                    "quorum and its disk not full?"
                ) from error
        await pause.wait()


def reason(error: BaseException) -> str:
    """The error in words; nats-py's own are often empty."""
    return str(error) or type(error).__name__
