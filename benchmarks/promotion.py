"""What promotion by evidence promises, by simulation: `python -m benchmarks.promotion` writes
benchmarks/results/promotion.json.

    equal        comparisons of a player with itself, and how many would ever have promoted, or ever rolled back,
                 whenever one had looked
    better       comparisons with a player that wins five points more, and the share promoted within so many pairs
    worse        comparisons with two planted regressions that get a fifth of the games, and the games of the
                 candidate until all games went to the control: the median, the largest, and the share below 200
    fixed        the same equal players, judged by a t interval of 95 % at every tenth pair: what looking costs without
                 such intervals

The results are those of real games of the demo (`examples/tictactoe/game.py`, win 1, draw 0.5): each player makes the
best move with its own probability (below 0: the worst one), and a random one else. Comparisons draw from `--games`
games of each player.
"""

from __future__ import annotations

import argparse
import random
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.bench import RESULTS, machine, write_results
from examples.tictactoe.game import CELLS, Game, free_cells
from examples.tictactoe.make_model import prospects
from journeywork.statistics import mean_of, wilson
from pipeline.sequential import interval

SHARES = {"win": 1.0, "draw": 0.5, "loss": 0.0, "illegal": 0.0}
SKILLS = {"control": 0.3, "better": 0.41, "worse": 0.0, "much worse": -0.45}
"""Probability of the best move. `better` wins about five points more than `control`, `worse` about fifteen less,
`much worse` about thirty."""
CONTROLS = 4
"""Games of the control for each of a candidate that gets a fifth of the games."""
PAIRS = (500, 1000, 2000, 4000)


def play(skill: float, games: int) -> list[float]:
    """Return the share of each of `games` games that a player wins."""
    rng = random.Random(f"player/{skill}")
    shares = []
    for number in range(games):
        game = Game(f"promotion/{skill}/{number}")
        while game.result is None:
            worth = prospects(game.board)
            chosen = (max if skill > 0 else min)(worth, key=lambda cell: worth[cell])
            game.play(CELLS[chosen if rng.random() < abs(skill) else rng.choice(free_cells(game.board))])
        shares.append(SHARES[game.result])
    return shares


def differences(
    candidate: list[float], control: list[float], pairs: int, seed: str, controls: int = 1
) -> list[float]:
    """Draw `pairs` games of the candidate and `controls` of the control for each, and return candidate less control."""
    rng = random.Random(f"promotion/{seed}")
    return [rng.choice(candidate) - fmean(rng.choices(control, k=controls)) for _ in range(pairs)]


def shown_after(values: list[float]) -> int:
    """Return the number of pairs after which the interval lies above 0; 0 if it never does. An interval lies in those
    before it, so the number is found by halving."""
    if interval(values, -1, 1).low <= 0:
        return 0
    low, high = 0, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if interval(values[:middle], -1, 1).low > 0 else (middle, high)
    return high


def looked_at(values: list[float]) -> bool:
    """Return whether a 95 % t interval at any tenth pair lies above 0, from the thirtieth on."""
    return any(mean_of(values[:end]).low > 0 for end in range(30, len(values) + 1, 10))


def share(hits: int, of: int) -> dict[str, Any]:
    estimate = wilson(hits, of)
    return {"share": estimate.mean, "low": estimate.low, "high": estimate.high, "count": of}


def rolled_back(name: str, players: dict[str, list[float]], comparisons: int) -> dict[str, Any]:
    """Return after how many of its games a worse player gets no more."""
    drawn = (
        differences(players[name], players["control"], PAIRS[1], f"{name}/{n}", CONTROLS)
        for n in range(comparisons)
    )
    after = [pairs for values in drawn if (pairs := shown_after([-v for v in values]))]
    return {
        "found": share(len(after), comparisons),
        "below_200": share(sum(pairs < 200 for pairs in after), comparisons),
        "median_games": float(np.median(after)),
        "most_games": max(after),
    }


def measure(comparisons: int, games: int) -> dict[str, Any]:
    """Run all simulations."""
    players = {name: play(skill, games) for name, skill in SKILLS.items()}
    control = players["control"]
    equal = [differences(control, control, PAIRS[-2], f"equal/{n}") for n in range(comparisons)]
    ends = [interval(values, -1, 1) for values in equal]
    better = [differences(players["better"], control, PAIRS[-1], f"better/{n}") for n in range(comparisons)]
    return {
        "players": {name: fmean(shares) for name, shares in players.items()},
        "equal": {
            "pairs": PAIRS[-2],
            "promoted": share(sum(end.low > 0 for end in ends), comparisons),
            "rolled_back": share(sum(end.high < 0 for end in ends), comparisons),
        },
        "better": {
            str(pairs): share(sum(interval(v[:pairs], -1, 1).low > 0 for v in better), comparisons)
            for pairs in PAIRS
        },
        "worse": {name: rolled_back(name, players, comparisons) for name in ("worse", "much worse")},
        "fixed": {"promoted": share(sum(map(looked_at, equal)), comparisons)},
    }


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--comparisons", type=int, default=1000)
    parser.add_argument("--games", type=int, default=20_000, help="of each player")
    args = parser.parse_args()
    write_results(RESULTS / "promotion.json", {"machine": machine(), **measure(args.comparisons, args.games)})


if __name__ == "__main__":
    main()
