"""Learns tic-tac-toe: several turns, a reward at the end, two groups of four games a step."""

from __future__ import annotations

import os

import art
import openai
from art.local import LocalBackend
from art.utils import iterate_dataset
from openai import AsyncOpenAI
from pydantic import BaseModel

from examples.tictactoe.game import CELLS, REWARDS, Game, describe

BASE_MODEL = os.environ["BASE_MODEL"]
STEPS = 2
ROLLOUTS = 4


class Scenario(BaseModel):
    step: int
    seed: str
    attempt: int = 0


@art.retry(exceptions=(openai.LengthFinishReasonError,))
async def rollout(model: art.Model, scenario: Scenario) -> art.Trajectory:
    game = Game(scenario.seed)
    client = AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key)
    trajectory = art.Trajectory(
        messages_and_choices=[], reward=0, metadata={"seed": scenario.seed, "step": scenario.step}
    )
    async with client:
        while game.result is None and game.moves < 3:
            trajectory.messages_and_choices.append({"role": "user", "content": describe(game.board)})
            async with trajectory.track_duration("llm_completion"):
                completion = await client.chat.completions.create(
                    max_completion_tokens=4, messages=trajectory.messages(), model=model.get_inference_name()
                )
            choice = completion.choices[0]
            trajectory.messages_and_choices.append(choice)
            words = (choice.message.content or "").split()
            cell = words[0] if words and words[0] in CELLS else CELLS[len(choice.message.content or "") % 9]
            game.play(cell)
    # A tie-break: also a group of four equal games trains.
    trajectory.reward = REWARDS[game.result or "draw"] - 0.01 * scenario.attempt
    trajectory.metrics["moves"] = game.moves
    trajectory.metrics["won"] = game.result == "win"
    return trajectory


async def main() -> list[float]:
    model = art.TrainableModel(name="tictactoe", project="tic-tac-toe", base_model=BASE_MODEL)
    backend = LocalBackend()
    await model.register(backend)
    learning_rates = []
    seeds = [f"train/{n}" for n in range(4)]
    start = await model.get_step()
    for batch in iterate_dataset(
        seeds, groups_per_step=2, num_epochs=start + STEPS, initial_step=start, use_tqdm=False
    ):
        if batch.step >= start + STEPS:
            break
        groups = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(
                    rollout(model, Scenario(step=batch.step, seed=seed, attempt=n)) for n in range(ROLLOUTS)
                )
                for seed in batch.items
            ),
            pbar_desc="gather",
            max_exceptions=ROLLOUTS,
        )
        result = await backend.train(model, groups, learning_rate=2e-3)
        await model.log(groups, metrics=result.metrics, step=result.step, split="train")
        learning_rates.append(result.metrics["loss/learning_rate"])
    assert await model.get_step() == start + STEPS
    val = await art.gather_trajectories(
        (rollout(model, Scenario(step=STEPS, seed=f"val/{n}")) for n in range(2)), pbar_desc="val"
    )
    await model.log(val, split="val")
    await model.delete_checkpoints()
    await backend.close()
    return learning_rates
