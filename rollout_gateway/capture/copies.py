"""Makes a trajectory of calls that were recorded in other trajectories.

A client that learns only afterwards which calls belong together opens one trajectory with `references` for all of its
calls. Later it completes a trajectory for each run, with references to the calls of that run. They are copied: the
copy has the tokens, logprobs and policy version of the original.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollout_gateway.capture.trajectory import Trajectory
from rollout_gateway.http.errors import ApiError

_COPIED_BYTES = 512 * 1024 * 1024
"""Limit on the requests and prompt tokens of the calls that one run is made of, in bytes. The log stores what calls
have in common once, but each reader of the run gets every call whole."""


class Reference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names one choice of a recorded call: the field `journeywork` of the choice, and the choice's index."""

    trajectory: str
    reply: str
    """`id` of the reply."""
    choice: int = 0


async def copy_calls(into: Trajectory, references: Sequence[tuple[Trajectory, Reference]]) -> None:
    """Copy calls into a trajectory, in this order. `references` holds each with the trajectory that recorded it.

    A copy that broke off is continued where it ended. Raises a 409 `ApiError` if the trajectory holds other calls, a
    404 one if a call is not on the log, and a 413 one if the calls are too large together."""
    await into.refresh()
    # By an earlier request for the same copies that broke off.
    copied_before = [(call.copied_from, call.choice) async for call in into.log.calls(into.id)]
    size = 0
    for number, (source, reference) in enumerate(references):
        original = await source.exchange_referenced(reference.reply, reference.choice)
        if original is None:
            raise no_such_call(reference)
        size += len(original.request) + len(original.prompt_ids)
        if size > _COPIED_BYTES:
            message = (
                f"The {len(references)} calls that {into.id!r} names have more than {_COPIED_BYTES:,} bytes. "
                "Complete another trajectory, with fewer or shorter ones."
            )
            raise ApiError(413, "body_too_large", message, param="exchanges")
        copied_from, place = f"{source.id}/{original.seq}", {"trajectory": into.id, "group": into.opened.group}
        if number >= len(copied_before):
            # `at` stays that of the original: a copy that is published again is the same event. `record` gives the
            # copy a `seq` of its own.
            await into.record([msgspec.structs.replace(original, copied_from=copied_from, **place)])
        elif copied_before[number] != (copied_from, original.choice):
            raise _holds_other_calls_error(into)
    if into.recorded.exchanges != len(references):
        raise _holds_other_calls_error(into)


def no_such_call(reference: Reference) -> ApiError:
    """Return the 404 for a reference to a call that the log does not hold complete."""
    reply = f"choice {reference.choice} of a reply {reference.reply!r}"
    message = f"Trajectory {reference.trajectory!r} has no recorded {reply}."
    return ApiError(404, "exchange_not_found", message, param="exchanges")


def _holds_other_calls_error(into: Trajectory) -> ApiError:
    """Return the 409 for a trajectory that has calls which the references do not name in this order: its own, or copies
    of other calls."""
    message = f"Trajectory {into.id!r} holds calls that `exchanges` does not name in this order. Open a new one."
    return ApiError(409, "calls_of_its_own", message)
