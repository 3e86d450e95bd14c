"""Learning on the job: every game is played once, and another program tells its result a minute later.

    python -m examples.tictactoe.job --seed 0 --run-dir runs/job

The agent is an unmodified OpenAI client with a base URL and a key. It opens no run and no group and reports nothing.
The gateway finds its games by their messages. `late_results`, a process with a key of role `feedback`, reports each
result `--delay` seconds after the game, by the id of the game's last answer. The trainer compares each game with the
others of its step. The held-out games are played with the base model and with the last version, and
`<run-dir>/report.json` is written. Exits with 1 if the run failed, or if its history holds what it must not."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import anyio
from anyio.abc import Process

from examples.common.late_results import NAME
from examples.common.running import ROOT, Installation, served_step
from examples.tictactoe.agent import Agents
from examples.tictactoe.demo import Progress, evaluate, outcome, parser_of, report_on
from examples.tictactoe.game import opening_seed
from examples.tictactoe.report import MODEL
from journeywork import AsyncJourneywork

ROLES = {"agent": "agent", "results": "feedback", "operator": "operator"}
IDLE_S = 10.0
"""Time without a call after which a game is over for the gateway."""
LOOK_EVERY_S = 1.0


async def work(agents: Agents, seeds: Iterator[str], desk: Process, progress: Progress, at_once: int) -> None:
    """Play games for ever, each opening once, and hand the results to `desk`."""
    assert desk.stdin is not None
    sending = anyio.Lock()

    async def worker() -> None:
        for seed in seeds:
            game, last = await agents.play_game(agents.client, MODEL, seed)
            progress.games += 1
            progress.recent.append(game.result == "win")
            line = json.dumps({"answer": last.id, "result": game.reward, "ended": time.time()})
            async with sending:
                await desk.stdin.send(f"{line}\n".encode())

    async with anyio.create_task_group() as tasks:
        for _ in range(at_once):
            tasks.start_soon(worker)


async def learn(
    agents: Agents,
    client: AsyncJourneywork,
    progress: Progress,
    args: argparse.Namespace,
    installation: Installation,
    desk: Process,
) -> None:
    """Play until the last step is served or the time is over. Raises `ExampleError` if the installation ends."""
    began = time.monotonic()
    seeds = (opening_seed("train", number, args.seed) for number in itertools.count())
    with anyio.move_on_after(args.seconds):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work, agents, seeds, desk, progress, args.concurrency)
            while progress.step < args.steps:
                installation.check()
                step = await served_step(client, MODEL)
                if step > progress.step:
                    progress.advance(step, time.monotonic() - began)
                await anyio.sleep(LOOK_EVERY_S)
            tasks.cancel_scope.cancel()


async def play(
    args: argparse.Namespace, keys: dict[str, str], installation: Installation, progress: Progress
) -> dict[str, Any]:
    print("starting", flush=True)
    gateway = await installation.ready()
    agents = Agents.at(gateway, keys["agent"])
    desk_of = [sys.executable, "-m", "examples.common.late_results"]
    environment = {**os.environ, "JOURNEYWORK_API_KEY": keys["results"]}
    async with (
        agents.client,
        AsyncJourneywork(gateway, api_key=keys["operator"]) as client,
        await anyio.open_process(
            [*desk_of, "--gateway", gateway, "--delay", str(args.delay)], env=environment, cwd=ROOT, stderr=None
        ) as desk,
        anyio.create_task_group() as showing,
    ):
        showing.start_soon(progress.show, agents)
        before = await evaluate(client, progress, f"{MODEL}@0", args.eval_games)
        progress.phase, progress.games = "on the job", 0
        progress.recent.clear()
        await learn(agents, client, progress, args, installation, desk)
        games = progress.games
        report = await evaluate(client, progress, f"{MODEL}@{progress.step}", args.eval_games, before)
        progress.phase = "the last results are reported"
        assert desk.stdin is not None
        assert desk.stdout is not None
        await desk.stdin.aclose()
        results = b"".join([part async for part in desk.stdout])
        showing.cancel_scope.cancel()
    entrants = report.entrants
    return {
        **outcome(report, progress),
        "games": games,
        "results": json.loads(results),
        "calls": agents.calls + sum(entrant.usage.calls for entrant in entrants),
        "failed_requests": agents.failed + sum(entrant.failed for entrant in entrants),
        "completed_by_agents": games + sum(len(task.trajectories) for e in entrants for task in e.tasks),
        "restarts": installation.restarts(),
    }


def settings(args: argparse.Namespace, keys: dict[str, str]) -> dict[str, Any]:
    """What this run sets beside the demo's settings."""
    return {
        "gateway.keys": [
            {"name": name, "role": ROLES[name], "sha256": hashlib.sha256(key.encode()).hexdigest()}
            for name, key in keys.items()
        ],
        # A run begins and ends where its messages say so, and is a group of one.
        "gateway.detection.enabled": True,
        "gateway.detection.grouped": False,
        "gateway.detection.idle_s": IDLE_S,
        "judge.group_size": 1,
        "judge.min_size": 1,
        # The reward is what somebody reports; a run waits for it.
        "judge.rewards": [{"name": NAME, "kind": "feedback"}],
        "feedback.wait_s": 10 * args.delay + 60,
        # A run is compared with the others of its step, and was played by a version of a minute ago.
        "trainer.loss.baseline": "batch",
        "trainer.loss.importance_sampling": "sequence_truncate",
        "trainer.max_staleness": args.max_staleness,
        "trainer.groups_per_step": args.games,
    }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("python -m examples.tictactoe.job", "runs/job", steps=58, seconds=440)
    parser.add_argument("--delay", type=float, default=60.0, help="seconds from the end of a game to its result")
    parser.add_argument("--games", type=int, default=144, help="games a step")
    parser.add_argument(
        "--max-staleness", type=int, default=24, help="steps after which a game is too old to learn from"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    keys = {name: secrets.token_urlsafe(24) for name in ROLES}
    report_on(args, settings(args, keys), partial(play, args, keys))


if __name__ == "__main__":
    main()
