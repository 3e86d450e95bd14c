"""Learning on the job: every game is played once, and another program tells its result a minute later.

    python -m examples.tictactoe.job --seed 0 --run-dir runs/job

The agent is an unmodified OpenAI client with a base URL and a key. It opens no run and no group and reports nothing.
The gateway finds its games by their messages. `late_results`, a process with a key of role `feedback`, reports each
result `--delay` seconds after the game, by the id of the game's last answer. The trainer compares each game with the
others of its step. The held-out games are played with the base model and with the last version, and
`<run-dir>/report.json` is written. Exits with 1 if the run failed, or if its history holds what it must not."""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from typing import Any

import anyio
import openai

from examples.common.late_results import new_keys, open_desk, settings_on_the_job
from examples.common.running import Installation
from examples.tictactoe.agent import play_game
from examples.tictactoe.demo import Progress, compare, parser_of, report_on
from examples.tictactoe.game import opening_seed
from examples.tictactoe.report import MODEL
from journeywork import AsyncJourneywork
from journeywork.evaluation import EvaluationReport

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
    seeds = (opening_seed("train", number, args.seed) for number in itertools.count())
    async with (
        openai.AsyncOpenAI(base_url=f"{gateway}/v1", api_key=keys["agent"], max_retries=12, timeout=120) as agent,
        open_desk(gateway, keys["results"], args.delay) as desk,
    ):

        async def play() -> None:
            """Play one game after the other until the last step is served, and hand over the results."""
            while progress.step < progress.steps:
                game, last = await play_game(agent, MODEL, next(seeds))
                progress.note(game.result == "win")
                await desk.report(last.id, game.reward)

        async def train(client: AsyncJourneywork, progress: Progress) -> None:
            async with anyio.create_task_group() as tasks:
                for _ in range(args.concurrency):
                    tasks.start_soon(play)

        compared = await compare(args, installation, progress, train, keys["operator"])
        report["results"] = await desk.finish()
    return compared


def settings(args: argparse.Namespace, keys: dict[str, str]) -> dict[str, Any]:
    """Return the settings of this run that differ from the demo's, by their dotted names."""
    return settings_on_the_job(keys, args.delay, IDLE_S) | {
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
    keys = new_keys()
    report_on(args, settings(args, keys), partial(work, args, keys))


if __name__ == "__main__":
    main()
