"""Returns of the earlier runs of a task, which runs without a group are compared with (`trainer.loss.baseline`).

Earlier runs of a group are the runs of other groups of the same task that the log holds before the group's own event,
at most `WINDOW` messages before it. A group without a task is compared with the earlier runs without a task of its API
key. So the baseline of a group is a function of the log up to the group's event, whatever a trainer process has seen,
and a step that is computed again is the same step. A group that was scored several times counts with its newest
verdict, and never as its own earlier run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeline.events import GroupScored, Member
from trainer.batches.returns import Floats, group_returns, has_call_returns

WINDOW = 20_000
"""Messages of the stream GROUPS before a group's own event in which its earlier runs lie. It bounds what is kept, what
a start reads again, and the age of rewards that an improving policy is compared with."""


class EarlierReturns(NamedTuple):
    """The returns of some runs, summed up: what a group is compared with."""

    runs: int = 0
    """Number of runs."""
    totals: tuple[float, ...] = (0.0,)
    """Sum of the runs' returns at each position. A run that is over by then counts with its last call, so the last
    number holds for all positions after it."""

    def total_at(self, position: int) -> float:
        """Return the sum of the runs' returns at a position."""
        return self.totals[min(position, len(self.totals) - 1)]

    @classmethod
    def sum_of(cls, parts: Sequence[EarlierReturns]) -> EarlierReturns:
        """Return the sums over the runs of all parts."""
        longest = max((len(p.totals) for p in parts), default=1)
        totals = tuple(sum(p.total_at(k) for p in parts) for k in range(longest))
        return cls(sum(p.runs for p in parts), totals)


class _Scored(NamedTuple):
    """One event `group.scored`: its stream sequence, the group's name, and the returns of its runs."""

    seq: int
    group: str
    runs: EarlierReturns


class EarlierRuns:
    """The returns of a model's runs on the log, with the discount `trainer.loss.turn_discount`, by task."""

    def __init__(self, discount: float) -> None:
        self._discount = discount
        self._groups: dict[tuple[str, str], list[_Scored]] = {}
        """By task or API key, in stream order."""

    def add(self, event: GroupScored, members: Sequence[Member], seq: int) -> None:
        """Add `members`, the runs that train of a group that was scored at `seq`. Adding it again changes nothing."""
        scored = self._groups.setdefault(_task_or_key(event), [])
        at = bisect_left(scored, seq, key=lambda entry: entry.seq)
        if at == len(scored) or scored[at].seq != seq:
            # Their events alone say how many calls they have.
            runs = group_returns(members, (), self._discount, by_call=has_call_returns(members, self._discount))
            scored.insert(at, _Scored(seq, event.group, _totals([run.values for run in runs])))

    def before(self, event: GroupScored, seq: int) -> EarlierReturns:
        """Return the returns of the earlier runs of the group that was scored at `seq` (see the module)."""
        scored = self._groups.get(_task_or_key(event), [])
        first, end = (bisect_left(scored, n, key=lambda entry: entry.seq) for n in (seq - WINDOW, seq))
        newest = {entry.group: entry.runs for entry in scored[first:end] if entry.group != event.group}
        return EarlierReturns.sum_of(list(newest.values()))

    def forget(self, floor: int) -> None:
        """Drop the runs that no group after the stream sequence `floor` is compared with."""
        recent = {key: [entry for entry in s if entry.seq > floor - WINDOW] for key, s in self._groups.items()}
        self._groups = {key: scored for key, scored in recent.items() if scored}


def task_baselines(returns: Sequence[Floats], earlier: EarlierReturns, batch_means: Floats) -> list[Floats]:
    """Return, for each run of a group, the baseline of each of its returns: the mean return, at the same position, of
    the earlier runs of its task and the other runs of its group. Where there are none, it is the mean of the batch."""
    count = earlier.runs + len(returns) - 1
    if not count:
        return [batch_means[: len(run)] for run in returns]
    out = []
    for index, run in enumerate(returns):
        others = EarlierReturns.sum_of([earlier, _totals([r for i, r in enumerate(returns) if i != index])])
        out.append(np.array([others.total_at(k) / count for k in range(len(run))]))
    return out


def _totals(returns: Sequence[Floats]) -> EarlierReturns:
    """Return the sums of some runs' returns at each position."""
    return EarlierReturns.sum_of([EarlierReturns(1, tuple(r.tolist())) for r in returns])


def _task_or_key(event: GroupScored) -> tuple[str, str]:
    """Return the key under which a group's runs are kept: its task, or its API key if it has no task."""
    return ("task", event.task) if event.task else ("key", event.owner)
