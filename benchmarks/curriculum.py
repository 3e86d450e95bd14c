"""What `journeywork.curriculum` does to groups without variance, on a recorded run and in training.

    python -m benchmarks.curriculum back-test runs/demo [--key benchmarks.curriculum:opening]
    python -m benchmarks.curriculum train [--seeds 0 1 2] [--ways new "pool 64" …]        about a minute a run

`back-test` goes through a recorded run in its order. Before each window of groups, it asks a curriculum that has seen
only earlier groups for the probability of each task in the window, and compares the share of groups without variance
among all of them with the share that sampling by these probabilities would have had.

`train` trains the demo's model in this process (sampler and trainer as in benchmarks/staleness.py, no lag), once per
seed and way to choose tasks: a new opening for each group, openings from a pool in turns, or openings from the pool by
the curriculum. A step trains on 12 groups with different rewards, however many groups have to be played for them, as
the demo does. The result is the number of games until held-out games are won at 0.70. Runs are added to those in the
file, benchmarks/results/curriculum.json."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.tictactoe.game import Game, opening_seed
from journeywork.curriculum import Curriculum, Recorded

RESULTS = Path(__file__).parent / "results" / "curriculum.json"
EXPLORE = 0.1
GOAL = 0.70
WAYS = ("new", "pool 64", "curriculum 64 3")


def opening(task: str) -> str:
    """The board that the demo's agent sees first: one of ten. For `--key`, where no opening was played twice."""
    return Game(task).board


# -- back-test -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """A recorded training group."""

    task: str
    step: int
    rewards: tuple[float, ...]

    @property
    def flat(self) -> bool:
        return max(self.rewards) - min(self.rewards) <= 1e-6


_GROUPS = """
SELECT any_value(t.task) AS task, max(coalesce(r.last_step, 0)) AS step, list(r.reward) AS rewards
FROM rewards r JOIN trajectories t USING (project, model, trajectory)
WHERE r.outcome = 'scored' AND r.split = 'train' AND r.reward IS NOT NULL
GROUP BY r.group_id HAVING count(*) > 1 ORDER BY min(t.opened_at)
"""


def recorded_groups(run_dir: str) -> list[Group]:
    command = [sys.executable, "-m", "pipeline", "sql", "--run-dir", run_dir, "--format", "json", _GROUPS]
    rows = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return [Group(row["task"], row["step"], tuple(row["rewards"])) for row in rows]


def _rank_probability(flat: Sequence[float], useful: Sequence[float]) -> float:
    """Return how often a useful group was given a higher probability than a flat one (the area under the ROC curve)."""
    pairs = [(u > f) + (u == f) / 2 for u in useful for f in flat]
    return statistics.fmean(pairs) if pairs else float("nan")


def back_test(groups: list[Group], key: Callable[[str], str], window: int) -> dict[str, Any]:
    """Return shares of groups without variance, as recorded and as the curriculum would have had them."""
    tasks = sorted({key(g.task) for g in groups})
    size = max(len(g.rewards) for g in groups)
    curriculum = Curriculum(tasks, group_size=size, explore=EXPLORE)
    given: list[tuple[float, bool]] = []
    chosen, windows = 0.0, 0
    for start in range(0, len(groups) - window + 1, window):
        offered = groups[start : start + window]
        weights = [curriculum.probability(key(g.task)) for g in offered]
        total = sum(weights) or 1.0
        by_weight = sum(w for w, g in zip(weights, offered, strict=True) if g.flat) / total
        chosen += (1 - EXPLORE) * by_weight + EXPLORE * statistics.fmean(g.flat for g in offered)
        windows += 1
        given += [(w, g.flat) for w, g in zip(weights, offered, strict=True)]
        curriculum.restore(Recorded(key(g.task), g.step, reward) for g in offered for reward in g.rewards)
    return {
        "groups": len(groups),
        "tasks": len(tasks),
        "groups_per_task": round(len(groups) / len(tasks), 2),
        "window": window,
        "flat_recorded": round(statistics.fmean(flat for _, flat in given), 4),
        "flat_chosen": round(chosen / windows, 4),
        "auc": round(_rank_probability([w for w, f in given if f], [w for w, f in given if not f]), 4),
    }


# -- training ------------------------------------------------------------------------------------------------------


def openings(way: str, seed: int, size: int) -> tuple[Iterator[str], Curriculum[str] | None]:
    """Return the tasks of a run in their order: `new`, `pool N`, or `curriculum N H` with a half-life of H steps."""
    kind, *numbers = way.split()
    if kind == "new":
        return (opening_seed("train", n, seed) for n in itertools.count()), None
    pool = [opening_seed("train", n, seed) for n in range(int(numbers[0]))]
    if kind == "pool":
        return itertools.cycle(pool), None
    curriculum = Curriculum(pool, group_size=size, half_life=float(numbers[1]), explore=EXPLORE, seed=seed)
    return (curriculum.next() for _ in itertools.count()), curriculum


def train(way: str, seed: int, args: argparse.Namespace, engine: Any, fresh: Any) -> dict[str, Any]:
    """Train until held-out games are won at `GOAL`, or for `args.steps` steps."""
    import torch

    from benchmarks.staleness import Arena
    from pipeline.events import GroupScored, Member
    from pipeline.log.messages import Place
    from trainer.batches.groups import TrainingGroup, examples
    from trainer.batches.sequences import build

    engine.model.load_adapter(fresh)
    arena = Arena(engine, args.base)
    random = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    state = engine.initial_state()
    tasks, curriculum = openings(way, seed, args.group_size)
    held_out = [opening_seed("val", n) for n in range(args.games)]
    curve, games, flat, played_groups = [], 0, 0, 0
    for step in range(args.steps):
        batch: list[TrainingGroup] = []
        while len(batch) < args.groups:
            seeds = [next(tasks) for _ in range(args.groups)]
            played = arena.play(
                [s for s in seeds for _ in range(args.group_size)], state.weights, step, random
            )
            games += len(played)
            for g, task in enumerate(seeds):
                part = played[g * args.group_size : (g + 1) * args.group_size]
                rewards = [r for r, _ in part]
                played_groups += 1
                if curriculum:
                    curriculum.record(task, rewards, step)
                if max(rewards) - min(rewards) <= 1e-6:
                    flat += 1
                    continue
                members = tuple(
                    Member(trajectory=e[0].trajectory, reward=r, first_step=step, last_step=step)
                    for r, e in part
                )
                scored = GroupScored(project="p", group=str(g), model="m", judge="agent", members=members)
                sequences = [s for _, e in part for s in build(e[0].trajectory, e)]
                batch.append(TrainingGroup(scored, Place(g, 0), sequences=sequences))
        batch = batch[: args.groups]
        indices = [i for i, group in enumerate(batch) for _ in group.sequences or ()]
        state = engine.step(state, examples(batch, engine.config), indices).state
        if (step + 1) % args.every == 0:
            ended = arena.play(held_out, state.weights, step + 1, torch.Generator().manual_seed(1234))
            wins = statistics.fmean(r == 1.0 for r, _ in ended)
            curve.append(
                {"step": step + 1, "games": games, "won": round(wins, 4), "flat": flat / played_groups}
            )
            if wins >= GOAL:
                break
    return {
        "games_to_goal": curve[-1]["games"] if curve[-1]["won"] >= GOAL else None,
        "steps": curve[-1]["step"],
        "won": curve[-1]["won"],
        "flat": round(flat / played_groups, 4),
        "curve": curve,
    }


def train_all(args: argparse.Namespace) -> dict[str, Any]:
    from pipeline.config import load, with_values
    from trainer.engine.engine import Engine

    config = with_values(
        load("examples/tictactoe/journeywork.toml").trainer,
        {"threads": args.threads, "max_staleness": 10_000, "check_share": 0.0},
    )
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        engine = Engine(args.base, config, Path(scratch))
        fresh = engine.model.weights()
        for seed in args.seeds:
            for way in args.ways:
                runs[f"{way}/{seed}"] = run = train(way, seed, args, engine, fresh)
                print(f"{way}, seed {seed}:", {k: v for k, v in run.items() if k != "curve"}, flush=True)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    commands = parser.add_subparsers(dest="command", required=True)
    replayed = commands.add_parser("back-test")
    replayed.add_argument("run_dir")
    replayed.add_argument(
        "--key", default="builtins:str", help="module:function from a task's text to its key"
    )
    replayed.add_argument("--window", type=int, default=48, help="groups on offer at a time")
    trained = commands.add_parser("train")
    trained.add_argument("--base", default="examples/tictactoe/model")
    trained.add_argument("--steps", type=int, default=30, help="at most")
    trained.add_argument("--every", type=int, default=2, help="steps between two plays of the held-out games")
    trained.add_argument("--groups", type=int, default=12)
    trained.add_argument("--group-size", type=int, default=6)
    trained.add_argument("--games", type=int, default=1000, help="held-out games")
    trained.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    trained.add_argument("--ways", nargs="*", default=list(WAYS))
    trained.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    report = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.command == "back-test":
        module, _, name = args.key.partition(":")
        found = back_test(
            recorded_groups(args.run_dir), getattr(importlib.import_module(module), name), args.window
        )
        report.setdefault("back_tests", {})[f"{Path(args.run_dir).name}, {args.key}"] = found
        print(json.dumps(found, indent=1))
    else:
        settings = {k: getattr(args, k) for k in ("steps", "every", "groups", "group_size", "games")}
        before = report.get("training", {"settings": settings})
        runs = before.get("runs", {}) if before["settings"] == settings else {}
        report["training"] = {"settings": settings, "runs": runs | train_all(args)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
