"""`make demo`: trains a base model on this machine until it wins measurably more games.

    python -m examples.tictactoe.demo --seed 0 --run-dir runs/demo

Starts `journeywork up` with `journeywork.toml`, plays the held-out games with the base model, lets the fleet play while
the trainer trains, plays the same held-out games with the last version, stops everything in order, queries the store
and writes `<run-dir>/report.json`. Exits with 1 if the run failed, or if its history holds what it must not."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from examples.common.running import ExampleError, Installation, make_room
from examples.tictactoe import held_out
from examples.tictactoe.agent import Finished, Fleet
from examples.tictactoe.game import opening_seed
from examples.tictactoe.nodes import Faults, Nodes
from examples.tictactoe.report import GOAL, MODEL, conclude, difference, win_rate
from journeywork import AsyncJourneywork, Trajectory, evaluation
from journeywork.curriculum import Curriculum
from journeywork.evaluation import EvaluationReport

SETTINGS = Path(__file__).with_name("journeywork.toml")
LOOK_EVERY_S = 0.25
"""Seconds between two reads of the policy version that the gateway serves."""
CURRICULUM_POOL = 64
"""Openings that a curriculum chooses from, without `--openings`."""

console = Console(highlight=False)


@dataclass
class Progress:
    """The values that the view shows."""

    phase: str = "starting"
    steps: int = 0
    """Step budget."""
    step: int = 0
    """Newest step that is served."""
    games: int = 0
    recent: deque[Finished] = field(default_factory=lambda: deque(maxlen=256))
    staleness: deque[int] = field(default_factory=lambda: deque(maxlen=256))
    """Policy steps taken while a game was played, for recent games."""
    curve: list[dict[str, float]] = field(default_factory=list)
    """Win rate of recent training games by step and time."""
    goal_s: float | None = None
    began: float = field(default_factory=time.monotonic)
    _calls: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def rate(self) -> float:
        """Moving average of the win rate, over at most 256 games."""
        return sum(game.result == "win" for game in self.recent) / max(len(self.recent), 1)

    def calls_per_s(self, calls: int) -> float:
        now = time.monotonic()
        self._calls.append((now, calls))
        while len(self._calls) > 2 and now - self._calls[0][0] > 15:
            self._calls.popleft()
        then, before = self._calls[0]
        return (calls - before) / (now - then) if now > then else 0.0

    def note(self, games: list[Finished]) -> None:
        self.games += len(games)
        self.recent.extend(games)
        self.staleness.extend(self.step - game.step for game in games)

    def advance(self, step: int, training_s: float) -> None:
        self.step = step
        self.curve.append({"step": step, "s": round(training_s, 1), "win_rate": round(self.rate, 3)})
        if self.goal_s is None and len(self.recent) == self.recent.maxlen and self.rate >= GOAL:
            self.goal_s = round(training_s, 1)

    def line(self, fleet: Fleet | None) -> dict[str, str]:
        calls = fleet.calls if fleet else 0
        lag = sum(self.staleness) / max(len(self.staleness), 1)
        return {
            "phase": self.phase,
            "step": f"{self.step}/{self.steps}",
            "policy": f"{MODEL}@{self.step}",
            "games": f"{self.games:,}",
            "win rate": f"{self.rate:.2f} (last {len(self.recent)})",
            "calls": f"{calls:,} ({self.calls_per_s(calls):.0f}/s)",
            "failed": str(fleet.failed if fleet else 0),
            "staleness": f"{lag:.2f}",
            "time": f"{time.monotonic() - self.began:.0f} s",
        }


class View:
    """The live view: a panel on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.fleet: Fleet | None = None

    def __rich__(self) -> Table:
        table = Table(show_header=False, box=None, title="Journeywork: tic-tac-toe, learning on the job")
        for name, value in self.progress.line(self.fleet).items():
            table.add_row(f"[dim]{name}[/]", f"[bold]{value}[/]")
        return table

    async def run(self) -> None:
        if console.is_terminal:
            with Live(self, console=console, refresh_per_second=4):
                await asyncio.Event().wait()
        while True:
            line = self.progress.line(self.fleet)
            print("  ".join(f"{k} {v}" for k, v in line.items()), flush=True)
            await asyncio.sleep(10)


class Openings:
    """The openings of the training groups: a new one each, those of a pool in turns, or chosen by a curriculum."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._seed, self._pool = args.seed, args.openings
        self._curriculum: Curriculum[str] | None = None
        if args.curriculum:
            pool = [opening_seed("train", n, args.seed) for n in range(self._pool or CURRICULUM_POOL)]
            self._curriculum = Curriculum(pool, group_size=args.group_size, seed=args.seed)

    def choose(self, group: int) -> str:
        """Return the game's seed for a group."""
        if self._curriculum:
            return self._curriculum.next()
        return opening_seed("train", group % self._pool if self._pool else group, self._seed)

    def record(self, opening: str, games: list[Finished]) -> None:
        """Tell how the games of a group ended."""
        ended = [game for game in games if game.result is not None]
        if self._curriculum:
            step = max((game.step for game in ended), default=0)
            self._curriculum.record(opening, [game.reward for game in ended], step)


class Training:
    """Games and steps at the same time. Groups are played just fast enough that the trainer never waits: at most `lead`
    batches of them are under way or waiting to be trained, which is what keeps them fresh."""

    def __init__(
        self, fleet: Fleet, progress: Progress, args: argparse.Namespace, installation: Installation | Nodes
    ) -> None:
        self.fleet, self.progress, self.args = fleet, progress, args
        self._installation = installation
        self._openings = Openings(args)
        self._useful = 0
        """Finished groups with different rewards. Groups with equal rewards train nothing and are not in a batch."""
        self._playing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._began = time.monotonic()
        self._moved = self._began
        """Time of the last progress."""
        self._skipped = 0
        """Groups that are no longer waited for, because the trainer may have discarded them."""

    @property
    def lead(self) -> int:
        """Groups ahead of the trainer."""
        trained: int = self.progress.step * self.args.groups
        return len(self._playing) + self._useful - self._skipped - trained

    def share(self) -> float:
        """Share of the budget of steps or of time that is used up, 0 to 1."""
        steps: float = self.progress.step / self.args.steps
        time_used: float = (time.monotonic() - self._began) / self.args.seconds
        return max(steps, time_used)

    async def run(self) -> None:
        """Play until the budget of steps or of time is used up and all games have ended."""
        group = 0
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch())
            while self.progress.step < self.args.steps and time.monotonic() - self._began < self.args.seconds:
                if self.lead < round(self.args.lead * self.args.groups):
                    task = tasks.create_task(self._play(group))
                    self._playing.add(task)
                    task.add_done_callback(self._playing.discard)
                    group += 1
                else:
                    self._changed.clear()
                    await self._changed.wait()
            if self._playing:
                await asyncio.wait(self._playing)
            watch.cancel()

    async def _play(self, group: int) -> None:
        seed = self._openings.choose(group)
        games = await self.fleet.play_all([seed] * self.args.group_size, group=f"train-{group}")
        self.progress.note(games)
        self._openings.record(seed, games)
        rewards = [game.reward for game in games if game.result is not None]
        self._useful += bool(rewards) and max(rewards) - min(rewards) > 1e-6
        self._moved = time.monotonic()
        self._changed.set()

    async def _watch(self) -> None:
        while True:
            self._installation.check()
            step = await served_step(self.fleet)
            now = time.monotonic()
            if step > self.progress.step:
                self.progress.advance(step, now - self._began)
                self._moved = now
                self._changed.set()
            elif now - self._moved > 15 and not self._playing:
                self._skipped += self.args.groups
                self._moved = now
                self._changed.set()
            await asyncio.sleep(LOOK_EVERY_S)


async def served_step(fleet: Fleet) -> int:
    """The policy step that the gateway routes to now."""
    answer: Any = await fleet.client.get("/policies", cast_to=object)
    (step,) = (entry["step"] for entry in answer["data"] if entry["model"] == MODEL)
    return int(step)


async def evaluate(
    client: AsyncJourneywork,
    progress: Progress,
    version: str,
    games: int,
    before: EvaluationReport | None = None,
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
        client, [version], held_out.batches(games), rollout, concurrency=held_out.AT_ONCE, progress=False,
        baseline=before.entrants[0] if before else None, record=before is not None,
        scenarios="examples.tictactoe.held_out:batches", rollout_name="examples.tictactoe.held_out:play",
    )  # fmt: skip


async def play(
    args: argparse.Namespace, installation: Installation | Nodes, progress: Progress
) -> dict[str, Any]:
    """Evaluate, train and evaluate again on a running installation. Returns the agents' part of the report."""
    view = View(progress)
    faults = Faults(installation) if isinstance(installation, Nodes) else None
    showing = asyncio.create_task(view.run())
    try:
        gateway = await installation.ready()
        started_s = time.monotonic() - progress.began
        fleet = view.fleet = Fleet.at(gateway, MODEL, args.concurrency)
        client = AsyncJourneywork(gateway)
        before = await evaluate(client, progress, f"{MODEL}@0", args.eval_games)
        evaluated_s = time.monotonic() - progress.began
        progress.phase, progress.games = "training", 0
        progress.recent.clear()
        progress.staleness.clear()
        training = Training(fleet, progress, args, installation)
        async with asyncio.TaskGroup() as tasks:
            breaking = tasks.create_task(faults.run(training.share)) if faults else None
            await training.run()
            if breaking:
                breaking.cancel()
        trained_s = time.monotonic() - progress.began
        trained_games, calls = progress.games, fleet.calls
        final = f"{MODEL}@{progress.step}"
        report = await evaluate(client, progress, final, args.eval_games, before)
        restarts = installation.restarts()
        await client.aclose()
        await fleet.client.close()
    finally:
        showing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await showing
    (installation.run_dir / "evaluation.html").write_text(evaluation.html_page(report), "utf-8")
    (installation.run_dir / "evaluation.md").write_text(evaluation.markdown_page(report), "utf-8")
    completed = [
        *fleet.completed,
        *(run for entrant in report.entrants for task in entrant.tasks for run in task.trajectories),
    ]
    return {
        "win_rate_before": win_rate(report.entrants[0]),
        "win_rate_after": win_rate(report.entrants[1]),
        "win_rate_difference": difference(report),
        "evaluation": report.id,
        "steps": progress.step,
        "calls": fleet.calls + sum(entrant.usage.calls for entrant in report.entrants),
        "calls_per_s_training": round(calls / max(trained_s - started_s, 1e-9), 1),
        "latency_mean_s": round(fleet.latency_s / max(fleet.calls, 1), 4),
        "completed_by_agents": len(completed),
        "completed_ids_distinct": len(set(completed)),
        "training_games": trained_games,
        "failed_requests": fleet.failed + sum(entrant.failed for entrant in report.entrants),
        "last_error": fleet.last_error,
        "faults": faults.done if faults else [],
        "restarts": restarts,
        "final_checkpoint": final,
        "time_to_0_70": progress.goal_s,
        "seconds": {
            "start": round(started_s, 1),
            "evaluate_before": round(evaluated_s - started_s, 1),
            "train": round(trained_s - evaluated_s, 1),
            "evaluate_after": round(time.monotonic() - progress.began - trained_s, 1),
        },
        "curve": progress.curve,
    }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.tictactoe.demo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps")
    parser.add_argument("--seconds", type=float, default=400, help="time to play and learn in, at most")
    parser.add_argument("--groups", type=int, default=12, help="groups a step")
    parser.add_argument("--group-size", type=int, default=6, help="games a group")
    parser.add_argument(
        "--eval-games", type=int, default=2000, help="held-out games, the same before and after"
    )
    parser.add_argument("--concurrency", type=int, default=24, help="games at once")
    parser.add_argument("--lead", type=float, default=1.5, help="batches under way or waiting, at most")
    parser.add_argument(
        "--openings", type=int, default=0, help="training openings; 0: a new one for each group"
    )
    parser.add_argument(
        "--curriculum",
        action="store_true",
        help="choose openings whose groups are likely to have different rewards",
    )
    parser.add_argument(
        "--nodes", type=int, choices=(1, 3), default=1,
        help="3: three NATS servers, two gateways, judges and stores, and faults in the middle of training",
    )  # fmt: skip
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    run_dir: Path = args.run_dir.absolute()
    make_room(run_dir)
    progress = Progress(steps=args.steps)
    overrides = {
        "judge.group_size": args.group_size,
        "trainer.groups_per_step": args.groups,
        "trainer.max_steps": args.steps,
        "trainer.optimizer.schedule": "linear",
        "trainer.seed": args.seed,
    }
    installation = (Nodes if args.nodes > 1 else Installation)(run_dir, SETTINGS, overrides)
    try:
        try:
            report = asyncio.run(play(args, installation, progress))
        finally:
            installation.stop()
        settings = {k: v for k, v in vars(args).items() if k != "run_dir"}
        wall_s = round(time.monotonic() - progress.began, 1)
        report = {"seed": args.seed, "settings": settings, **report, "wall_s": wall_s}
        if findings := conclude(report, installation.run_dir, console):
            raise ExampleError("the history holds what it must not: " + "; ".join(findings))
    except KeyboardInterrupt:
        console.print(f"stopped; what was played so far is in {run_dir}")
        raise SystemExit(130) from None
    except ExampleError as error:
        console.print(f"[red]{error}[/]")
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
