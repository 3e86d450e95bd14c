"""`make demo-game`: trains a base model on this machine until it wins measurably more games.

    python -m examples.tictactoe.demo --seed 0 --run-dir runs/demo-game

Starts `journeywork up` with `journeywork.toml`, plays the held-out games with the base model, lets agents play while
the trainer trains, plays the same held-out games with the last version, stops everything in order, queries the store
and writes `<run-dir>/report.json`. Exits with 1 if the run failed, or if its history holds what it must not."""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import openai

from examples.common import running
from examples.tictactoe import held_out
from examples.tictactoe.agent import play
from examples.tictactoe.game import opening_seed
from examples.tictactoe.report import MODEL, conclude
from journeywork import AsyncJourneywork, LoopOptions, Trajectory, evaluation, loop
from journeywork.evaluation import EvaluationReport

SETTINGS = Path(__file__).with_name("journeywork.toml")
LOOK_EVERY_S = 0.5
"""Seconds between two reads of the policy version that the gateway serves."""
OPENINGS = 20_000
"""Openings of the training groups, one each; more than a run plays."""
SHOW_EVERY_S = 10.0


@dataclass
class Progress:
    """What a run has done so far."""

    steps: int
    """Step budget."""
    phase: str = "starting"
    step: int = 0
    """Newest step that is served."""
    games: int = 0
    failed: int = 0
    """Training runs that failed."""
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=256))
    """Whether each of the recent games was won."""
    began: float = field(default_factory=time.monotonic)

    def enter(self, phase: str) -> None:
        """Begin a phase: its games are counted from 0."""
        self.phase, self.games = phase, 0
        self.recent.clear()

    def note(self, won: bool) -> None:
        """Count a game."""
        self.games += 1
        self.recent.append(won)

    async def show(self) -> None:
        """Print a line every ten seconds."""
        while True:
            rate = sum(self.recent) / max(len(self.recent), 1)
            print(
                f"{time.monotonic() - self.began:.0f} s  {self.phase}  step {self.step}/{self.steps}  "
                f"games {self.games:,}  win rate {rate:.2f} (last {len(self.recent)})  failed {self.failed}",
                flush=True,
            )
            await anyio.sleep(SHOW_EVERY_S)

    async def follow(self, client: AsyncJourneywork, installation: running.Installation) -> None:
        """Read the step that is served, until cancelled. Raises `ExampleError` if the installation ends."""
        while True:
            installation.check()
            self.step = await running.served_step(client, MODEL)
            await anyio.sleep(LOOK_EVERY_S)


Train = Callable[[AsyncJourneywork, Progress], Awaitable[None]]


async def evaluate(
    client: AsyncJourneywork, progress: Progress, version: str, games: int, before: EvaluationReport | None = None
) -> EvaluationReport:
    """Let exactly this version play the held-out games, which are never trained on. With the report of the base model,
    the report has both entrants and is recorded on the log."""
    progress.enter(f"held-out games at {version}")

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


async def compare(
    args: argparse.Namespace, installation: running.Installation, progress: Progress, train: Train, api_key: str = ""
) -> EvaluationReport:
    """Play the held-out games with the base model, call `train`, and play them with the last version. `train` plays
    until the last step is served; it is cancelled after `args.seconds`."""
    async with AsyncJourneywork(await installation.ready(), api_key=api_key) as client:
        async with anyio.create_task_group() as showing:
            showing.start_soon(progress.show)
            before = await evaluate(client, progress, f"{MODEL}@0", args.eval_games)
            progress.enter("training")
            with anyio.move_on_after(args.seconds):
                async with anyio.create_task_group() as training:
                    training.start_soon(progress.follow, client, installation)
                    await train(client, progress)
                    training.cancel_scope.cancel()
            progress.step = await running.served_step(client, MODEL)
            report = await evaluate(client, progress, f"{MODEL}@{progress.step}", args.eval_games, before)
            showing.cancel_scope.cancel()
        return report


async def rehearse(args: argparse.Namespace, client: AsyncJourneywork, progress: Progress) -> None:
    """Play training games until the last step is served, in groups of games with the same opening."""

    async def rollout(run: Trajectory, seed: str) -> float:
        """Play the game of a seed, and count it in `progress`. Returns its reward."""
        try:
            game = await play(running.agent(run), run, seed)
        except openai.APIError:
            progress.failed += 1
            raise
        progress.note(game.result == "win")
        return game.reward

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
    await loop(client, MODEL, openings, rollout, options)


def parser_of(prog: str, run_dir: str, *, steps: int, seconds: float) -> argparse.ArgumentParser:
    """Return the flags of the demo and of `examples.tictactoe.job`, with these defaults."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, default=Path(run_dir))
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps")
    parser.add_argument("--seconds", type=float, default=seconds, help="time to play and learn in, at most")
    parser.add_argument("--eval-games", type=int, default=2000, help="held-out games, the same before and after")
    parser.add_argument("--concurrency", type=int, default=24, help="games at once")
    running.add_flags(parser)
    return parser


Play = Callable[[running.Installation, Progress, dict[str, Any]], Awaitable[EvaluationReport]]


def report_on(args: argparse.Namespace, overrides: dict[str, Any], play: Play) -> None:
    """Start an installation with the demo's settings and `overrides`, `play` on it, stop it, and write the report.
    `play` may add to the report. Exits with 1 if the run failed, or if its history holds what it must not."""
    run_dir: Path = args.run_dir.absolute()
    progress = Progress(args.steps)
    learning = {"trainer.max_steps": args.steps, "trainer.optimizer.schedule": "linear", "trainer.seed": args.seed}
    settings = {k: v for k, v in vars(args).items() if k != "run_dir"}
    report: dict[str, Any] = {"seed": args.seed, "settings": settings}
    with running.as_program(run_dir):
        running.make_room(run_dir)
        with running.Installation(run_dir, SETTINGS, learning | overrides, *running.flags(args)) as installation:
            compared = anyio.run(play, installation, progress, report)
        report |= {"steps": progress.step, "wall_s": round(time.monotonic() - progress.began, 1)}
        report["failed_runs"] = progress.failed + sum(entrant.failed for entrant in compared.entrants)
        conclude(compared, report, run_dir)


def main(argv: list[str] | None = None) -> None:
    parser = parser_of("python -m examples.tictactoe.demo", "runs/demo-game", steps=80, seconds=400)
    parser.add_argument("--groups", type=int, default=12, help="groups a step")
    parser.add_argument("--group-size", type=int, default=6, help="games a group")
    args = parser.parse_args(argv)

    async def play(installation: running.Installation, progress: Progress, _: dict[str, Any]) -> EvaluationReport:
        return await compare(args, installation, progress, partial(rehearse, args))

    report_on(args, {"judge.group_size": args.group_size, "trainer.groups_per_step": args.groups}, play)


if __name__ == "__main__":
    main()
