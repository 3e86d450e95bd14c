"""Reinforcement learning, supervised fine-tuning and reinforcement learning again, on one adapter.

    python -m examples.tictactoe.fine_tuned --run-dir runs/fine_tuned

A program for `journeywork.art`: steps of `train`, one step of `train_sft` on games that the policy won, and steps of
`train` again. The same held-out games are played with the base model and after each of the three phases; win rates,
their differences and the lineage of the versions go to `<run-dir>/report.json`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import anyio

import journeywork.art as art
from examples.common import judged, running
from examples.tictactoe import held_out
from examples.tictactoe.agent import MAX_TOKENS
from examples.tictactoe.demo import SETTINGS
from examples.tictactoe.game import Game, describe, opening_seed
from examples.tictactoe.report import MODEL
from journeywork import AsyncJourneywork, evaluation
from journeywork.evaluation import EvaluationReport

BASE = "examples/tictactoe/model"
GROUPS, GAMES = 12, 6
"""Openings of a step, and games of each."""
LEARNING_RATE = 6e-3
"""Of the first step of `train`; it falls to 0 with the last."""
CONVERSATIONS, BATCH, UPDATES_RATE = 320, 32, 2e-4
"""The latest won games, on which the policy is fine-tuned, those of an update, and its learning rate."""
LINEAGE = """
SELECT step, parent, CASE WHEN groups[1] LIKE 'sft-%' THEN 'sft' ELSE 'rl' END AS trained, len(groups) AS groups
FROM checkpoints ORDER BY step
"""


async def play(model: art.TrainableModel[Any], seed: str) -> art.Trajectory:
    """Play the game of `seed` with the newest version."""
    game, run = Game(seed), art.Trajectory(messages_and_choices=[])
    while game.result is None:
        run.messages_and_choices.append({"role": "user", "content": describe(game.board)})
        reply = await model.openai_client().chat.completions.create(
            model=model.name, messages=run.messages(), max_tokens=MAX_TOKENS, temperature=1.0
        )
        run.messages_and_choices.append(reply.choices[0])
        game.play(reply.choices[0].message.content)
    run.reward, run.metrics = game.reward, {"win": float(game.result == "win")}
    return run


async def reinforce(model: art.TrainableModel[Any], steps: range, total: int) -> list[art.Trajectory]:
    """Train a step for each number in `steps`, of `total`. Returns the games that were won."""
    won: list[art.Trajectory] = []
    for step in steps:
        seeds = [opening_seed("train", step * GROUPS + number) for number in range(GROUPS)]
        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(play(model, seed) for _ in range(GAMES)) for seed in seeds
        )
        await model.train(groups, config=art.TrainConfig(learning_rate=LEARNING_RATE * (1 - step / total)))
        games = [game for group in groups for game in group]
        won += [game for game in games if game.metrics["win"]]
        print(f"step {step + 1}: {sum(g.metrics['win'] for g in games) / len(games):.2f} won", flush=True)
    return won


async def run(args: argparse.Namespace) -> dict[str, Any]:
    model: art.TrainableModel[Any] = art.TrainableModel(
        name=MODEL, project="fine_tuned", base_model=args.base, base_path=str(args.run_dir)
    )
    reports: list[EvaluationReport] = []
    async with judged.backend(args) as backend:
        await model.register(backend)
        async with AsyncJourneywork(await backend.url_of(model)) as client:

            async def evaluate() -> None:
                version = model.get_inference_name(await model.get_step())
                before = reports[0].entrants[0] if reports else None
                tasks = held_out.batches(args.held_out)
                reports.append(
                    await evaluation.play(
                        client,
                        [version],
                        tasks,
                        held_out.play,
                        concurrency=4,
                        progress=False,
                        baseline=before,
                    )
                )
                print(f"{version}: {reports[-1].entrants[-1].estimate('win')} held-out games won", flush=True)

            await evaluate()
            won = await reinforce(model, range(args.steps), 2 * args.steps)
            await evaluate()
            chats = [art.Trajectory(messages_and_choices=[*game.messages()]) for game in won[-CONVERSATIONS:]]
            await model.train_sft(chats, art.TrainSFTConfig(learning_rate=UPDATES_RATE, batch_size=BATCH))
            await evaluate()
            await reinforce(model, range(args.steps, 2 * args.steps), 2 * args.steps)
            await evaluate()
        history = backend.run_dir(model)
    phases = ("base", "rl", "sft", "rl_again")
    return {
        "held_out_games": args.held_out,
        "win_rate": {p: asdict(r.entrants[-1].estimate("win")) for p, r in zip(phases, reports, strict=True)},
        "less_base": {
            p: asdict(r.difference(1, "win")) for p, r in zip(phases[1:], reports[1:], strict=True)
        },
        "fine_tuned_on": len(chats),
        "lineage": running.rows(history, LINEAGE),
    }


def main() -> None:
    args = running.arguments(__doc__, "fine_tuned", steps=16, held_out=held_out.GAMES, base=BASE)
    args.config = args.config or SETTINGS
    running.make_room(args.run_dir)
    report = {"steps": args.steps} | anyio.run(run, args)
    (args.run_dir / "report.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(json.dumps({name: report[name] for name in ("win_rate", "less_base")}, indent=1))


if __name__ == "__main__":
    main()
