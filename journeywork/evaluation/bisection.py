"""`journeywork bisect`: find the step at which a task was lost.

    journeywork bisect support@40 support@80 --rollout my.agent:play --scenarios lost.jsonl

The first version is one that had the task, the second one that lost it. Both play first; the threshold is the middle of
their mean rewards. Then a version between the two plays until its mean is shown to lie on one side, and so on:
log2(steps) + 1 comparisons, of which the first is that of the two. It ends with the step that lost the task. Each run
plays a task that is drawn at random, so that a mean is the same over tasks that differ.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import anyio

from journeywork.command_line import add_gateway, at_least_one, client_of, exit_status, gateway_of, output_of_one_object
from journeywork.evaluation.loading import add_tasks, load_rollout, load_scenarios
from journeywork.evaluation.playing import EvaluationClient, PlayOptions, play
from journeywork.evaluation.results import REWARD
from journeywork.gathering import TooManyExceptionsError
from journeywork.trajectory import parse_policy
from journeywork.transport import JourneyworkError
from journeywork.versions import resolve

_BETS = (0.02, 0.05, 0.12, 0.27, 0.6)
"""Shares of its capital that each bettor stakes on every value."""

_ROUND = 32
"""Runs of a round, at least: they play concurrently, also if there is one task."""


class UndecidedError(Exception):
    """The runs do not show on which side of the threshold a version lies."""


class SequentialTest:
    """Whether the mean of values from 0 to 1 is above or below `threshold`, asked after each value.

    Bettors stake a fixed share of their capital on each value against "the mean is at most the threshold", and others
    against "it is at least". The mean of their capitals is a supermartingale if they are wrong, and reaches
    2 / `alpha` with a probability of at most `alpha` / 2 (I. Waudby-Smith and A. Ramdas 2021, "Estimating means of
    bounded random variables by betting", section 4; Ville's inequality). So one may look after every value."""

    def __init__(self, threshold: float, alpha: float) -> None:
        self.values: list[float] = []
        self._threshold, self._bound = threshold, math.log(2 / alpha)
        self._above, self._below = [0.0] * len(_BETS), [0.0] * len(_BETS)
        self.side: int = 0
        """1: above; -1: below; 0: not shown yet."""

    def add(self, value: float) -> None:
        """Take a value in."""
        self.values.append(value)
        for capital, value_, least in (
            (self._above, value, self._threshold),
            (self._below, 1 - value, 1 - self._threshold),
        ):
            for number, bet in enumerate(_BETS):
                capital[number] += math.log1p(bet * (value_ / least - 1))
        if not self.side:
            self.side = (_mean_log(self._above) >= self._bound) - (_mean_log(self._below) >= self._bound)

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)


def _mean_log(logs: Sequence[float]) -> float:
    """Return the logarithm of the mean of numbers that are given by their logarithms."""
    highest = max(logs)
    return highest + math.log(sum(math.exp(x - highest) for x in logs) / len(logs))


class Played(NamedTuple):
    """A version that played, its mean reward, and its number of runs."""

    version: str
    mean: float
    runs: int
    lost: bool
    """Whether it has lost the task."""


@dataclass
class Bisection:
    """The step that lost the tasks, and what was played to find it."""

    threshold: float
    played: list[Played] = field(default_factory=list)
    """In the order in which they played: the good and the bad version, then those between."""

    @property
    def culprit(self) -> Played:
        """The first version that lost the task."""
        return min((p for p in self.played if p.lost), key=lambda p: _step(p.version))

    @property
    def before(self) -> Played:
        """The last version before it, of those that there are."""
        return max((p for p in self.played if not p.lost), key=lambda p: _step(p.version))

    @property
    def comparisons(self) -> int:
        """The first one is of two versions."""
        return len(self.played) - 1


@dataclass(frozen=True)
class Limits:
    """When versions are told apart: `alpha` for all comparisons together, rewards cut to `low` and `high`, and the most
    rounds, of 32 runs or of as many as there are tasks, in which a version is compared with the threshold.

    50 rounds of 32 runs tell versions apart nearly always whose means differ by 0.15 of the range."""

    alpha: float = 0.05
    low: float = 0.0
    high: float = 1.0
    rounds: int = 50
    seed: int = 0
    """Of the draws of tasks."""


class _Runs:
    """Runs of versions at the tasks, whose rewards are shares of the way from `low` to `high`."""

    def __init__(
        self, client: EvaluationClient, tasks: Sequence[Any], rollout: Any, limits: Limits, options: Any
    ) -> None:
        self._client, self._tasks, self._rollout = client, tasks, rollout
        self._limits, self._options = limits, {"progress": False} | options
        self._draws = random.Random(limits.seed)

    async def shares(self, version: str) -> list[float]:
        """Play a round. Raises `UndecidedError` if no run has a reward."""
        # Drawn, not in turn: the test needs values whose mean does not depend on those before. In the order of the
        # tasks, the easy ones could decide before the hard ones play. A task that is drawn twice gives two values:
        # `play` tells tasks apart by their number.
        drawn = self._draws.choices(self._tasks, k=max(len(self._tasks), _ROUND))
        report = await play(self._client, [version], drawn, self._rollout, record=False, **self._options)
        rewards = [task.values[REWARD] for task in report.entrants[0].tasks if REWARD in task.values]
        if not rewards:
            raise UndecidedError(f"{version}: no run has a reward: return it from the rollout")
        low, high = self._limits.low, self._limits.high
        return [(min(max(reward, low), high) - low) / (high - low) for reward in rewards]

    def reward(self, share: float) -> float:
        return self._limits.low + share * (self._limits.high - self._limits.low)

    async def tested(self, version: str, threshold: float, alpha: float) -> Played:
        """Play until the version's side of the threshold is shown. Raises `UndecidedError` after the last round."""
        test = SequentialTest(threshold, alpha)
        for _ in range(self._limits.rounds):
            for value in await self.shares(version):
                test.add(value)
            if test.side:
                return Played(version, self.reward(test.mean), len(test.values), test.side < 0)
        # The best bet on a distance d from the threshold lets the logarithm of the capital grow by 2 d^2 a run or more,
        # on average. The half more is for chance.
        distance = 1.5 * math.sqrt(math.log(2 * len(_BETS) / alpha) / (2 * len(test.values)))
        raise UndecidedError(
            f"{version}: after {len(test.values)} runs its mean, {self.reward(test.mean):.3g}, is not shown to lie on "
            f"either side of {self.reward(threshold):.3g}; so many runs show a distance of "
            f"{distance * (self._limits.high - self._limits.low):.2g}: give more --rounds, or tasks on which the "
            "versions differ more"
        )


async def bisect(
    client: EvaluationClient,
    good: str,
    bad: str,
    tasks: Sequence[Any],
    rollout: Any,
    limits: Limits = Limits(),
    **options: Any,
) -> Bisection:
    """Find the step between the versions `good` and `bad` of a model that lost `tasks`. Return a `Bisection`, whose
    `culprit` is the version of that step. `options` are those of `play`.

    Versions that are gone are passed over. If the tasks were lost more than once, the culprit is one of the steps that
    lost them.
    Raises `ValueError` if the two are no versions of one model in this order, `UndecidedError` if the runs do not tell
    them or one between them apart, and as `play` does."""
    (model, _), (other, _) = parse_policy(good), parse_policy(bad)
    good, bad = await resolve(client, [good, bad])
    if model != other or _step(good) >= _step(bad):
        raise ValueError(f"{good} and {bad} must be two versions of one model, the good one first")
    if not limits.low < limits.high or not 0 < limits.alpha < 1:
        raise ValueError("the range needs low < high, and alpha lies between 0 and 1")
    known = {v for v in await client.models() if v.rpartition("@")[0] == model}
    between = sorted((v for v in known if _step(good) < _step(v) < _step(bad)), key=_step)
    # Tests: one of each end, and ceil(log2(n + 1)) to find the culprit among n versions between them and `bad`.
    alpha = limits.alpha / (math.ceil(math.log2(len(between) + 1)) + 2)
    runs = _Runs(client, tasks, rollout, limits, options)
    ends: list[list[float]] = [[], []]
    for values, version in zip(ends, (good, bad), strict=True):
        while len(values) < _ROUND:
            values += await runs.shares(version)
    means = [sum(values) / len(values) for values in ends]
    threshold = sum(means) / 2
    if means[0] <= means[1]:
        raise UndecidedError(f"{good} is not better than {bad}: {means[0]:.3g} against {means[1]:.3g}")
    bisection = Bisection(runs.reward(threshold))
    for version, lost in ((good, False), (bad, True)):
        played = await runs.tested(version, threshold, alpha)
        if played.lost != lost:
            raise UndecidedError(f"{good} is not better than {bad}: {version} has {played.mean:.3g}")
        bisection.played.append(played)
    first, end = 0, len(between)  # the culprit is one of these, or the next one after them
    while first < end:
        middle = (first + end) // 2
        played = await runs.tested(between[middle], threshold, alpha)
        bisection.played.append(played)
        first, end = (first, middle) if played.lost else (middle + 1, end)
    return bisection


def _step(version: str) -> int:
    """Return the step of a version as `models` lists it: `@` stands in no name of a model or branch."""
    return int(version.rpartition("@")[2])


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Exits 1 if the runs do not tell the versions apart, 2 if an argument is unusable."""
    parser = argparse.ArgumentParser(
        prog="journeywork bisect",
        description=inspect.cleandoc(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("good", help="version that had the task, such as support@40")
    add("bad", help="later version that lost it")
    add_tasks(parser, "the tasks that were lost: a list, a function that returns one, or JSONL")
    add("--alpha", type=float, default=0.05, help="probability that any comparison is wrong (default: 0.05)")
    add("--range", type=float, nargs=2, default=(0.0, 1.0), metavar=("LOW", "HIGH"), help="of the reward")
    add(
        "--rounds",
        type=at_least_one,
        default=50,
        help=f"most rounds in which one version is compared, each of {_ROUND} runs or of as many as there are tasks "
        f"(default: 50, for means that differ by 0.15); before, each of the two versions plays at least {_ROUND} runs, "
        "from which the threshold is taken",
    )
    add_gateway(parser)
    args = parser.parse_args(argv)
    with (
        exit_status((ValueError, OSError), (JourneyworkError, TooManyExceptionsError, UndecidedError)),
        output_of_one_object(args.json),
    ):
        rollout, tasks = load_rollout(args.rollout), load_scenarios(args.scenarios)
        limits = Limits(args.alpha, args.range[0], args.range[1], args.rounds)
        bisection = anyio.run(_bisect, args, gateway_of(args), tasks, rollout, limits)
    if args.json:
        found = {
            "culprit": bisection.culprit.version,
            "before": bisection.before.version,
            "threshold": bisection.threshold,
            "alpha": args.alpha,
            "comparisons": bisection.comparisons,
            "played": [played._asdict() for played in bisection.played],
        }
        sys.stdout.write(json.dumps(found) + "\n")
        return
    for version, mean, runs, lost in bisection.played:
        sys.stdout.write(f"{version}: {mean:.3g} in {runs} runs, {'lost' if lost else 'had'} the tasks\n")
    culprit = bisection.culprit.version
    sys.stdout.write(
        f"\n{culprit} lost them, after {bisection.before.version}: {bisection.comparisons} comparisons, threshold "
        f"{bisection.threshold:.3g}, any of them wrong with a probability of at most {args.alpha:g}\n"
        f"what it learned from:  journeywork sql \"FROM lineage WHERE version = '{culprit}'\"\n"
    )


async def _bisect(args: argparse.Namespace, url: str, tasks: list[Any], rollout: Any, limits: Limits) -> Bisection:
    options: PlayOptions = {"concurrency": args.concurrency, "max_exceptions": args.max_exceptions}
    async with client_of(url, args) as client:
        return await bisect(client, args.good, args.bad, tasks, rollout, limits, **options)


if __name__ == "__main__":
    main()
