"""`make demo-game`: trains a base model on this machine until it wins measurably more games.

    python -m examples.tictactoe.demo --seed 0 --run-dir runs/demo-game

Starts `journeywork up` with `journeywork.toml`, plays the held-out games with the base model, lets agents play while
the trainer trains, plays the same held-out games with the last version, stops everything in order, queries the store
and writes `<run-dir>/report.json`. Exits with 1 if the run failed, or if its history holds what it must not."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console

from examples.common.running import ExampleError, Installation, add_flags, flags, make_room, served_step
from examples.tictactoe import held_out
from examples.tictactoe.agent import Agents
from examples.tictactoe.game import opening_seed
from examples.tictactoe.report import GOAL, MODEL, conclude, difference, win_rate
from journeywork import AsyncJourneywork, LoopOptions, Trajectory, evaluation, loop
from journeywork.evaluation import EvaluationReport
from journeywork.transport import plain_errors

SETTINGS = Path(__file__).with_name("journeywork.toml")
LOOK_EVERY_S = 0.25
"""Seconds between two reads of the policy version that the gateway serves."""
OPENINGS = 20_000
"""Openings of the training groups, one each; more than a run plays."""
SHOW_EVERY_S = 10.0

console = Console(highlight=False)


@dataclass
class Progress:
    """What a run has done so far."""

    phase: str = "starting"
    steps: int = 0
    """Step budget."""
    step: int = 0
    """Newest step that is served."""
    games: int = 0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=256))
    """Whether each of the recent games was won."""
    staleness: deque[int] = field(default_factory=lambda: deque(maxlen=256))
    """Policy steps taken while a game was played, for recent games."""
    curve: list[dict[str, float]] = field(default_factory=list)
    """Win rate of recent training games by step and time."""
    goal_s: float | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def rate(self) -> float:
        """Moving average of the win rate, over at most 256 games."""
        return sum(self.recent) / max(len(self.recent), 1)

    def note(self, won: bool, step: int) -> None:
        """Count a game whose last move step `step` made."""
        self.games += 1
        self.recent.append(won)
        # The newest step is asked for once a second, so a game can know a newer one.
        self.staleness.append(max(self.step - step, 0))

    def advance(self, step: int, training_s: float) -> None:
        self.step = step
        self.curve.append({"step": step, "s": round(training_s, 1), "win_rate": round(self.rate, 3)})
        if self.goal_s is None and len(self.recent) == self.recent.maxlen and self.rate >= GOAL:
            self.goal_s = round(training_s, 1)

    def line(self, agents: Agents) -> str:
        lag = sum(self.staleness) / max(len(self.staleness), 1)
        return (
            f"{time.monotonic() - self.began:.0f} s  {self.phase}  step {self.step}/{self.steps}  "
            f"games {self.games:,}  win rate {self.rate:.2f} (last {len(self.recent)})  calls {agents.calls:,}  "
            f"failed {agents.failed}  staleness {lag:.2f}"
        )

    async def show(self, agents: Agents) -> None:
        """Print a line every ten seconds."""
        while True:
            print(self.line(agents), flush=True)
            await asyncio.sleep(SHOW_EVERY_S)


async def train(
    agents: Agents, client: AsyncJourneywork, progress: Progress, args: argparse.Namespace, installation: Installation
) -> None:
    """Play until the budget of steps or of time is used up, while the trainer trains. Each group has an opening of its
    own. Raises `ExampleError` if the installation ends."""
    began = time.monotonic()

    async def rollout(run: Trajectory, seed: str) -> float:
        game, step = await agents.play(run, seed)
        progress.note(game.result == "win", step)
        return game.reward

    async def watch() -> None:
        while True:
            installation.check()
            step = await served_step(client, MODEL)
            if step > progress.step:
                progress.advance(step, time.monotonic() - began)
            await anyio.sleep(LOOK_EVERY_S)

    options = LoopOptions(
        "train",
        steps=args.steps,
        groups_per_step=args.groups,
        group_size=args.group_size,
        concurrency=args.concurrency,
        max_staleness=1,
        tries=1,
        describe=str,
        poll_s=1.0,
    )
    openings = [opening_seed("train", number, args.seed) for number in range(OPENINGS)]
    with anyio.move_on_after(args.seconds):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await loop(client, MODEL, openings, rollout, options)
            tasks.cancel_scope.cancel()
    progress.step = await served_step(client, MODEL)


async def evaluate(
    client: AsyncJourneywork, progress: Progress, version: str, games: int, before: EvaluationReport | None = None
) -> EvaluationReport:
    """Let exactly this version play the held-out games, which are never trained on. With the report of the base model,
    the report has both entrants and is recorded on the log."""
    progress.phase = f"held-out games at {version}"
    progress.recent.clear()

    async def rollout(run: Trajectory, batch: held_out.Batch) -> float:
        reward = await held_out.play(run, batch)
        progress.games += len(batch["seeds"])
        return reward

    return await evaluation.play(
        client,
        [version],
        held_out.batches(games),
        rollout,
        concurrency=held_out.AT_ONCE,
        progress=False,
        baseline=before.entrants[0] if before else None,
        record=before is not None,
        scenarios="examples.tictactoe.held_out:batches",
        rollout_name="examples.tictactoe.held_out:play",
    )


def outcome(report: EvaluationReport, progress: Progress) -> dict[str, Any]:
    """Return what a run's report says of the policy: win rates of the base and of the last version, and the curve."""
    return {
        "win_rate_before": win_rate(report.entrants[0]),
        "win_rate_after": win_rate(report.entrants[1]),
        "win_rate_difference": difference(report),
        "evaluation": report.id,
        "steps": progress.step,
        "final_checkpoint": f"{MODEL}@{progress.step}",
        "time_to_0_70": progress.goal_s,
        "curve": progress.curve,
    }


async def play(args: argparse.Namespace, installation: Installation, progress: Progress) -> dict[str, Any]:
    """Evaluate, train and evaluate again on a running installation. Returns the agents' part of the report."""
    print("starting", flush=True)
    gateway = await installation.ready()
    started_s = time.monotonic() - progress.began
    agents = Agents.at(gateway)
    async with agents.client, AsyncJourneywork(gateway) as client, anyio.create_task_group() as showing:
        showing.start_soon(progress.show, agents)
        before = await evaluate(client, progress, f"{MODEL}@0", args.eval_games)
        evaluated_s = time.monotonic() - progress.began
        progress.phase, progress.games = "training", 0
        progress.recent.clear()
        progress.staleness.clear()
        await train(agents, client, progress, args, installation)
        trained_s = time.monotonic() - progress.began
        trained_games, calls = progress.games, agents.calls
        report = await evaluate(client, progress, f"{MODEL}@{progress.step}", args.eval_games, before)
        restarts = installation.restarts()
        showing.cancel_scope.cancel()
    completed = [
        *agents.runs,
        *(run for entrant in report.entrants for task in entrant.tasks for run in task.trajectories),
    ]
    return {
        **outcome(report, progress),
        "calls": agents.calls + sum(entrant.usage.calls for entrant in report.entrants),
        "calls_per_s_training": round(calls / max(trained_s - started_s, 1e-9), 1),
        "latency_mean_s": round(agents.latency_s / max(agents.calls, 1), 4),
        "completed_by_agents": len(completed),
        "completed_ids_distinct": len(set(completed)),
        "training_games": trained_games,
        "failed_requests": agents.failed + sum(entrant.failed for entrant in report.entrants),
        "last_error": agents.last_error,
        "restarts": restarts,
        "seconds": {
            "start": round(started_s, 1),
            "evaluate_before": round(evaluated_s - started_s, 1),
            "train": round(trained_s - evaluated_s, 1),
            "evaluate_after": round(time.monotonic() - progress.began - trained_s, 1),
        },
    }


def parser_of(prog: str, run_dir: str, *, steps: int, seconds: float) -> argparse.ArgumentParser:
    """Return the flags of the demo and of `examples.tictactoe.job`, with these defaults."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, default=Path(run_dir))
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps")
    parser.add_argument("--seconds", type=float, default=seconds, help="time to play and learn in, at most")
    parser.add_argument("--eval-games", type=int, default=2000, help="held-out games, the same before and after")
    parser.add_argument("--concurrency", type=int, default=24, help="games at once")
    add_flags(parser)
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("python -m examples.tictactoe.demo", "runs/demo-game", steps=80, seconds=400)
    parser.add_argument("--groups", type=int, default=12, help="groups a step")
    parser.add_argument("--group-size", type=int, default=6, help="games a group")
    return parser.parse_args(argv)


Play = Callable[[Installation, Progress], Coroutine[Any, Any, dict[str, Any]]]


def report_on(args: argparse.Namespace, overrides: dict[str, Any], play: Play) -> None:
    """Start an installation with the demo's settings and `overrides`, `play` on it, stop it, and write the report that
    `play` returned with what the history says. Exits with 1 if the run failed, or if its history holds what it must
    not."""
    run_dir: Path = args.run_dir.absolute()
    make_room(run_dir)
    progress = Progress(steps=args.steps)
    installation = Installation(
        run_dir,
        SETTINGS,
        {
            "trainer.max_steps": args.steps,
            "trainer.optimizer.schedule": "linear",
            "trainer.seed": args.seed,
            **overrides,
        },
        *flags(args),
    )
    try:
        try:
            with plain_errors(Exception):
                report = asyncio.run(play(installation, progress))
        finally:
            installation.stop()
        settings = {k: v for k, v in vars(args).items() if k != "run_dir"}
        wall_s = round(time.monotonic() - progress.began, 1)
        report = {"seed": args.seed, "settings": settings, **report, "wall_s": wall_s}
        if findings := conclude(report, run_dir, console):
            raise ExampleError("the history holds what it must not: " + "; ".join(findings))
    except KeyboardInterrupt:
        console.print(f"stopped; what was played so far is in {run_dir}", markup=False)
        raise SystemExit(130) from None
    except ExampleError as error:
        console.print(str(error), style="red", markup=False)
        raise SystemExit(1) from error


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    overrides = {"judge.group_size": args.group_size, "trainer.groups_per_step": args.groups}
    report_on(args, overrides, partial(play, args))


if __name__ == "__main__":
    main()
