"""Learns tic-tac-toe from a user's words alone: no reward, no group, each game once.

    python -m examples.corrections.train --seed 0 --run-dir runs/corrections-0
    python -m examples.corrections.train --seed 0 --run-dir runs/shuffled-0 --shuffled

After each game the user says of its bad moves which move was right ("play b2"), by the id of the answer. The trainer's
teacher is the policy with these words under the board. The held-out games are played without any words. With
`--shuffled` each objection is one to a move of another game: a policy must not learn from those.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from functools import partial

import anyio
from openai.types.chat import ChatCompletion

from examples.common import running
from examples.common.curve import as_json
from examples.corrections.user import objection
from examples.tictactoe import held_out
from examples.tictactoe.agent import moves
from examples.tictactoe.game import Game, opening_seed
from journeywork import AsyncJourneywork, Trajectory

MODEL = "corrections"
GAMES = 72
"""Games with objections that a step trains; also the games of a round."""
AHEAD = 2
"""Steps beyond the served one whose games may be played already."""
SETTINGS = {
    "judge.group_size": 1,
    "judge.min_size": 1,
    "trainer.groups_per_step": GAMES,
    "trainer.distill.weight": 1.0,
    "trainer.distill.divergence": "reverse_kl",
    "trainer.distill.top_k": 400,  # the whole vocabulary
    "trainer.distill.hint_template": "\n{hint}",
}


Said = tuple[ChatCompletion, str]
"""An answer of the agent, and the user's words on it."""


async def play(run: Trajectory, seed: str) -> list[Said]:
    """Play one game. Returns what the user has to say of it. The run gets no reward."""
    game = Game(seed)
    objections: list[Said] = []
    async for board, answer in moves(running.agent(run), MODEL, game):
        if said := objection(board, answer.choices[0].message.content or ""):
            objections.append((answer, said))
    run.metrics = {"win": float(game.result == "win")}
    return objections


def exchanged(objections: list[list[Said]]) -> list[Said]:
    """Return the objections, each now about an answer in another game. Every answer that had an objection has one.

    Raises `ValueError` if more than half of them are to one game."""
    said = list(itertools.chain.from_iterable(objections))
    shift = max(map(len, objections), default=0)
    if 2 * shift > len(said):
        raise ValueError("more than half of the objections are to one game: play more games in a round")
    return [(said[i][0], said[(i + shift) % len(said)][1]) for i in range(len(said))]


async def play_round(client: AsyncJourneywork, seeds: list[str], *, shuffled: bool) -> tuple[int, int]:
    """Play games, say what the user has to say of them, and end the runs. Returns the number of games with objections,
    and of objections."""
    objections: list[list[Said]] = [[] for _ in seeds]

    async def play_game(i: int, run: Trajectory) -> None:
        objections[i] = await play(run, seeds[i])

    async with contextlib.AsyncExitStack() as open_runs:
        async with anyio.create_task_group() as tg:
            for i in range(len(seeds)):
                tg.start_soon(play_game, i, await open_runs.enter_async_context(client.trajectory(MODEL)))
        said = exchanged(objections) if shuffled else list(itertools.chain.from_iterable(objections))
        async with anyio.create_task_group() as tg:
            for answer, words in said:
                tg.start_soon(partial(client.feedback, answer, text=words))
    return sum(map(bool, objections)), len(said)


async def train(client: AsyncJourneywork, args: argparse.Namespace, *, shuffled: bool) -> dict[str, int]:
    """Play games, each once, until the last step is served. Returns how many games were played and how many had
    objections: only these train."""
    counts = {"games": 0, "games_with_objections": 0, "objections": 0}
    while (step := await running.served_step(client, MODEL)) < args.steps:
        if counts["games_with_objections"] >= (step + AHEAD) * GAMES:
            await anyio.sleep(running.LOOK_EVERY_S)
            continue
        first = counts["games"]
        seeds = [opening_seed("train", number, args.seed) for number in range(first, first + GAMES)]
        with_objections, objections = await play_round(client, seeds, shuffled=shuffled)
        counts["games"] += GAMES
        counts["games_with_objections"] += with_objections
        counts["objections"] += objections
    return counts


async def main() -> None:
    shuffled = "--shuffled" in sys.argv
    given = [argument for argument in sys.argv[1:] if argument != "--shuffled"]
    args = running.arguments(__doc__, MODEL, steps=40, held_out=2000, argv=given)
    async with running.installation(args, SETTINGS) as client:
        began = time.monotonic()
        counts = await train(client, args, shuffled=shuffled)
        train_s = round(time.monotonic() - began)
        compared = await client.evaluate(
            [f"{MODEL}@0", f"{MODEL}@{args.steps}"],
            held_out.batches(args.held_out),
            held_out.play,
            concurrency=held_out.AT_ONCE,
            progress=False,
        )
    report = {
        "command": args.command + " --shuffled" * shuffled,
        "seed": args.seed,
        **counts,
        "train_s": train_s,
        "before": as_json(compared.entrants[0].estimate("win")),
        "after": as_json(compared.entrants[1].estimate("win")),
        "difference": as_json(compared.difference(1, "win")),
    }
    (args.run_dir / "report.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    anyio.run(main)
