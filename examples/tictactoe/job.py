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
from functools import partial
from typing import Any

import anyio
import openai

from examples.common.late_results import NAME
from examples.common.running import ROOT, Installation
from examples.tictactoe.agent import play_game
from examples.tictactoe.demo import Progress, compare, parser_of, report_on
from examples.tictactoe.game import opening_seed
from examples.tictactoe.report import MODEL
from journeywork import AsyncJourneywork
from journeywork.evaluation import EvaluationReport

ROLES = {"agent": "agent", "results": "feedback", "operator": "operator"}
IDLE_S = 10.0
"""Time without a call after which a game is over for the gateway."""


async def work(
    args: argparse.Namespace,
    keys: dict[str, str],
    installation: Installation,
    progress: Progress,
    report: dict[str, Any],
) -> EvaluationReport:
    """Evaluate, play each opening once until the last step is served, and evaluate again. `results` of the report:
    how many results the gateway took and refused."""
    gateway = await installation.ready()
    command = [sys.executable, "-m", "examples.common.late_results", "--gateway", gateway, "--delay", str(args.delay)]
    environment = {**os.environ, "JOURNEYWORK_API_KEY": keys["results"]}
    seeds = (opening_seed("train", number, args.seed) for number in itertools.count())
    async with (
        openai.AsyncOpenAI(base_url=f"{gateway}/v1", api_key=keys["agent"], max_retries=12, timeout=120) as agent,
        await anyio.open_process(command, env=environment, cwd=ROOT, stderr=None) as desk,
    ):
        assert desk.stdin is not None
        assert desk.stdout is not None
        stdin, sending = desk.stdin, anyio.Lock()

        async def play() -> None:
            while progress.step < progress.steps:
                game, last = await play_game(agent, MODEL, next(seeds))
                progress.note(game.result == "win")
                line = json.dumps({"answer": last.id, "result": game.reward, "ended": time.time()})
                async with sending:
                    await stdin.send(f"{line}\n".encode())

        async def train(client: AsyncJourneywork, progress: Progress) -> None:
            async with anyio.create_task_group() as tasks:
                for _ in range(args.concurrency):
                    tasks.start_soon(play)

        compared = await compare(args, installation, progress, train, keys["operator"])
        await stdin.aclose()
        report["results"] = json.loads(b"".join([part async for part in desk.stdout]))
    return compared


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
    parser.add_argument("--max-staleness", type=int, default=24, help="steps after which a game is not learned from")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    keys = {name: secrets.token_urlsafe(24) for name in ROLES}
    report_on(args, settings(args, keys), partial(work, args, keys))


if __name__ == "__main__":
    main()
