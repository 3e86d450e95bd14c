"""Returns of calls: what a call's tokens are credited with, where rewards belong to single calls.

The return of call k of a run with the reward R and the rewards r_j of its calls 0 to K - 1 is

    G_k = sum over j >= k of gamma^(j - k) r_j + gamma^(K - 1 - k) R

with gamma = `trainer.loss.turn_discount`: the return of Sutton and Barto (2018, section 3.3) over the turns of a run,
as turn-level credit assignment for agents uses it (arXiv 2505.11821). What happens after a call is credited to it, what
happened before is not. Returns are compared with those of the same position in the other runs, because runs of one task
are at about the same point after as many calls; a run that is over by then counts with its last call.

In a run of several agents (`x-journeywork-role`) the sum is over the later calls of the same agent, K counts its calls,
and positions are counted by agent: what an agent did is credited with its own rewards and the run's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.events import Member
from trainer.sequences import TokenSequence

Floats = npt.NDArray[np.float64]


Roles = Mapping[int, str]
"""The agent that made a call, by the call's `seq`, in a run of several agents. Other calls are of the agent `""`."""
NO_ROLES: Roles = {}


def returns_of(member: Member, calls: int, discount: float, roles: Roles = NO_ROLES) -> Floats:
    """Return the return of each of the first `calls` calls of a run, [calls]. A call is credited with the later calls
    of the same agent only, and the run's reward is added to the last call of each agent."""
    returns, following = np.zeros(calls), dict.fromkeys(["", *roles.values()], member.reward)
    for call in range(calls - 1, -1, -1):
        role = roles.get(call, "")
        following[role] += member.call_rewards.get(str(call), 0.0)
        returns[call] = following[role]
        following[role] *= discount
    return returns


@dataclass(frozen=True, eq=False)
class RunReturns:
    """The returns of a run's calls. They are compared with those of the same agent at the same position."""

    values: Floats
    """The return of each call, [calls]; a single number where the run has one for all its calls."""
    positions: Sequence[tuple[str, int]] = (("", 0),)
    """For each of `values` its agent, and which of its agent's calls it is, from 0."""


def _positions(calls: int, roles: Roles) -> list[tuple[str, int]]:
    """Return, for each of a run's first `calls` calls, its agent and its number among the agent's calls, from 0."""
    counts: Counter[str] = Counter()
    out = []
    for call in range(calls):
        role = roles.get(call, "")
        out.append((role, counts[role]))
        counts[role] += 1
    return out


def role_baselines(runs: Sequence[RunReturns]) -> dict[str, Floats]:
    """Return, by agent, the mean return at each of its positions over the runs in which it made a call."""
    return {role: mean_returns(returns, max(map(len, returns))) for role, returns in _by_role(runs).items()}


def _by_role(runs: Sequence[RunReturns]) -> dict[str, list[Floats]]:
    """Return, by agent, the returns of its calls in each run in which it made one."""
    by_role: dict[str, list[Floats]] = {}
    for run in runs:
        roles = np.array([role for role, _ in run.positions])
        for role in dict.fromkeys(roles.tolist()):
            by_role.setdefault(role, []).append(run.values[roles == role])
    return by_role


def largest_difference(runs: Sequence[RunReturns]) -> float:
    """Return the largest difference between returns that are compared: those of one agent at one position."""
    differences = [0.0]
    for returns in _by_role(runs).values():
        for position in range(max(map(len, returns))):
            compared = [r[min(position, len(r) - 1)] for r in returns]
            differences.append(max(compared) - min(compared))
    return max(differences)


def has_call_returns(members: Iterable[Member], discount: float) -> bool:
    """Whether calls of one run may have different returns, so that runs have to be compared call by call."""
    return discount != 1.0 or any(m.call_rewards for m in members)


def calls_with_credit(member: Member, calls: int, discount: float, roles: Roles = NO_ROLES) -> npt.NDArray[np.bool_]:
    """Return which of the first `calls` calls of a run train, [calls]: all if the run was judged. If only calls were
    judged, these are the calls with a reward or a hint, and those that a later reward of the same agent is credited
    to."""
    if member.graded == "run":
        return np.ones(calls, np.bool_)
    rewarded = {int(call) for call in member.call_rewards}
    judged = rewarded | {max(hint.call, 0) for hint in member.hints}  # a hint of call -1 is on the first one
    last_rewarded = {roles.get(call, ""): call for call in sorted(rewarded)}  # by agent
    trains = np.zeros(calls, np.bool_)
    for call in range(calls):
        has_later_reward = discount > 0 and call <= last_rewarded.get(roles.get(call, ""), -1)
        trains[call] = call in judged or has_later_reward
    return trains


def group_returns(
    members: Sequence[Member],
    sequences: Sequence[TokenSequence],
    discount: float,
    *,
    by_call: bool,
    roles: Mapping[str, Roles] | None = None,
) -> list[RunReturns]:
    """Return the returns of each member. With `by_call`, a member has a return for each of its calls, also for those of
    which no token is trained; else a single one, its reward. `roles`: by trajectory, in a group with runs of several
    agents."""
    if not by_call:
        return [RunReturns(np.array([m.reward], np.float64)) for m in members]
    calls = {m.trajectory: max(m.exchanges, 1) for m in members}
    for sequence in sequences:
        if sequence.calls is not None and sequence.trajectory in calls:
            calls[sequence.trajectory] = max(calls[sequence.trajectory], int(sequence.calls.max()) + 1)
    out = []
    for member in members:
        count, of_run = calls[member.trajectory], (roles or {}).get(member.trajectory, NO_ROLES)
        out.append(RunReturns(returns_of(member, count, discount, of_run), _positions(count, of_run)))
    return out


def mean_returns(returns: Sequence[Floats], calls: int) -> Floats:
    """Return the mean return of the runs at each of `calls` positions, [calls]. A run that is over by then counts with
    its last call."""
    return np.array([np.array([r[min(call, len(r) - 1)] for r in returns]).mean() for call in range(calls)])


def by_token(call_values: Floats, sequence: TokenSequence) -> Floats | None:
    """Return for each trained token of a sequence the value of the call that sampled it, [k]; the last value is also
    that of all later calls. `None` if all calls have one value or the calls of the tokens are not known."""
    if len(call_values) == 1 or sequence.calls is None:
        return None
    return call_values[np.clip(sequence.calls[sequence.loss_mask], 0, len(call_values) - 1)]
