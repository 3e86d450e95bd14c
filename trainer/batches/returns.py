"""Returns of calls: what a call's tokens are credited with, where rewards belong to single calls.

The return of call k of a run with the reward R and the rewards r_j of its calls 0 to K - 1 is

    G_k = sum over j >= k of gamma^(j - k) r_j + gamma^(K - 1 - k) R

with gamma = `trainer.loss.turn_discount`: the return of Sutton and Barto (2018, section 3.3) over the turns of a run,
as turn-level credit assignment for agents uses it (arXiv 2505.11821). What happens after a call is credited to it, what
happened before is not. Returns are compared with those of the same position in the other runs, because runs of one task
are at about the same point after as many calls; a run that is over by then counts with its last call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pipeline.events import Member
from trainer.batches.sequences import TokenSequence

Floats = npt.NDArray[np.float64]


def returns_of(member: Member, calls: int, discount: float) -> Floats:
    """The return of each of the first `calls` calls of a run, [calls]. Calls after them count for nothing."""
    returns, following = np.zeros(calls), member.reward
    for call in range(calls - 1, -1, -1):
        following += member.call_rewards.get(str(call), 0.0)
        returns[call] = following
        following *= discount
    return returns


def differ(members: Iterable[Member], discount: float) -> bool:
    """Whether calls of one run may have different returns."""
    return discount != 1.0 or any(m.call_rewards for m in members)


def judged_calls(member: Member) -> int:
    """How many calls of a run of which only calls were judged train: those up to the last one with a reward or a hint.
    0: all."""
    if member.graded == "run":
        return 0
    return 1 + max([*(int(c) for c in member.call_rewards), *(h.call for h in member.hints), 0])


def group_returns(
    members: Sequence[Member], sequences: Sequence[TokenSequence], discount: float, *, by_call: bool
) -> list[Floats]:
    """The returns of each member: `by_call` of each of its calls, also of those of which no token is trained, else one
    number, its reward."""
    if not by_call:
        return [np.array([m.reward], np.float64) for m in members]
    calls = {m.trajectory: judged_calls(m) or max(m.exchanges, 1) for m in members}
    whole = {m.trajectory for m in members if not judged_calls(m)}
    for sequence in sequences:
        if sequence.calls is not None and sequence.trajectory in whole:
            calls[sequence.trajectory] = max(calls[sequence.trajectory], int(sequence.calls.max()) + 1)
    return [returns_of(m, calls[m.trajectory], discount) for m in members]


def baseline(returns: Sequence[Floats], calls: int) -> Floats:
    """The mean return of the runs at each of `calls` positions, [calls]."""
    return np.array([np.array([r[min(call, len(r) - 1)] for r in returns]).mean() for call in range(calls)])


def by_token(of_calls: Floats, sequence: TokenSequence) -> Floats | None:
    """The numbers of the calls that sampled the trained tokens of a sequence, [k]; `None` where one number is for all
    calls."""
    if len(of_calls) == 1 or sequence.calls is None:
        return None
    return of_calls[np.clip(sequence.calls[sequence.loss_mask], 0, len(of_calls) - 1)]
