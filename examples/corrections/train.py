"""Learns tic-tac-toe from a user's words alone: no reward, no group, each game once.

    python -m examples.corrections.train --seed 0 --run-dir runs/corrections-0
    python -m examples.corrections.train --seed 0 --run-dir runs/shuffled-0 --shuffled

After each bad move of the agent, the user says which move was right ("play b2"), by the id of the answer. The trainer's
teacher is the policy with these words under the board. The held-out games are played without any words. With
`--shuffled` each objection is one to another move, of another game: a policy must not learn from those.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import deque

import anyio

from examples.common import running
from examples.common.curve import as_json
from examples.corrections.user import objection
from examples.tictactoe import held_out
from examples.tictactoe.agent import MAX_TOKENS
from examples.tictactoe.game import Game, describe, opening_seed
from journeywork import AsyncJourneywork, Trajectory, evaluation

MODEL = "corrections"
GAMES = 72
"""Games in a step."""
AHEAD = 2
"""Games may be played that are trained at most so many steps after the one that the gateway serves."""
SETTINGS = {
    "judge.group_size": 1,
    "judge.min_size": 1,
    "trainer.groups_per_step": GAMES,
    "trainer.distill.weight": 1.0,
    "trainer.distill.divergence": "reverse_kl",
    "trainer.distill.top_k": 400,  # the whole vocabulary
    "trainer.distill.hint_template": "\n{hint}",
}


class User:
    """What the user says to the games of a run. `shuffled`: about an earlier move of another game."""

    def __init__(self, *, shuffled: bool) -> None:
        self._earlier: deque[str] | None = deque() if shuffled else None
        self.objections = 0

    def says(self, board: str, reply: str) -> str:
        """Return the objection to a reply, empty if there is none."""
        said = objection(board, reply)
        if said and self._earlier is not None:
            self._earlier.append(said)
            said = self._earlier.popleft() if len(self._earlier) > GAMES else ""
        self.objections += bool(said)
        return said


async def play(client: AsyncJourneywork, run: Trajectory, seed: str, user: User) -> None:
    """Play one game. The run gets the user's words, and no reward."""
    agent, game = running.agent(run), Game(seed)
    messages: list[dict[str, str]] = []
    while game.result is None:
        board = game.board
        messages.append({"role": "user", "content": describe(board)})
        answer = await agent.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=MAX_TOKENS,
            temperature=1.0,  # type: ignore[arg-type]
        )
        reply = answer.choices[0].message.content or ""
        if said := user.says(board, reply):
            await client.feedback(answer, text=said, key=f"{run.id}-{len(messages)}")
        messages.append({"role": "assistant", "content": reply})
        game.play(reply)
    run.metrics = {"win": float(game.result == "win")}


async def train(client: AsyncJourneywork, args: argparse.Namespace, user: User) -> int:
    """Play games, each once, until the last step is served. Returns the number of games."""
    openings, played = itertools.count(), 0

    async def one(limiter: anyio.CapacityLimiter) -> None:
        nonlocal played
        async with limiter, client.trajectory(MODEL) as run:
            await play(client, run, opening_seed("train", next(openings), args.seed), user)
        played += 1

    limiter = anyio.CapacityLimiter(running.CONCURRENCY)
    begun = 0
    async with anyio.create_task_group() as tg:
        while (step := await running.served_step(client, MODEL)) < args.steps:
            for _ in range(min((step + AHEAD) * GAMES, args.steps * GAMES + GAMES // 2) - begun):
                tg.start_soon(one, limiter)
                begun += 1
            await anyio.sleep(running.LOOK_EVERY_S)
    return played


async def main() -> None:
    shuffled = "--shuffled" in sys.argv
    given = [argument for argument in sys.argv[1:] if argument != "--shuffled"]
    args = running.arguments(__doc__, MODEL, steps=40, held_out=2000, argv=given)
    user = User(shuffled=shuffled)
    async with running.installation(args, SETTINGS) as client:
        games = await train(client, args, user)
        compared = await evaluation.play(
            client, [f"{MODEL}@0", f"{MODEL}@{args.steps}"], held_out.batches(args.held_out), held_out.play,
            concurrency=held_out.AT_ONCE, progress=False,
        )  # fmt: skip
    report = {
        "command": args.command + " --shuffled" * shuffled,
        "seed": args.seed,
        "games": games,
        "objections": user.objections,
        "before": as_json(compared.entrants[0].estimate("win")),
        "after": as_json(compared.entrants[1].estimate("win")),
        "difference": as_json(compared.difference(1, "win")),
    }
    (args.run_dir / "report.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    anyio.run(main)
