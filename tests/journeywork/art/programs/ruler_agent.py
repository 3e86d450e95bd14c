"""An agent judged by RULER, with a sub-conversation that is trained too and one that is not."""

from __future__ import annotations

import os

import art
from art.local import LocalBackend
from art.rewards import ruler_score_group
from art.trajectories import History

BASE_MODEL = os.environ["BASE_MODEL"]
JUDGE_URL = os.environ["JUDGE_URL"]
STEPS = 2


async def ask(model: art.Model, messages: art.Messages) -> object:
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=5
    )
    return completion.choices[0]


async def rollout(model: art.Model, question: str) -> art.Trajectory:
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "user", "content": question}],
        reward=0.25,
        metadata={"scenario_id": question},
    )
    draft = await ask(model, trajectory.messages())  # thrown away: it is recorded and must not train
    trajectory.messages_and_choices.append(await ask(model, trajectory.messages()))
    trajectory.messages_and_choices.append({"role": "user", "content": draft.message.content or "-"})
    trajectory.messages_and_choices.append(await ask(model, trajectory.messages()))
    return trajectory


async def judge(group: art.TrajectoryGroup) -> art.TrajectoryGroup | None:
    return await ruler_score_group(
        group,
        "openai/judge",
        extra_litellm_params={"api_base": JUDGE_URL, "api_key": "none"},
        swallow_exceptions=True,
    )


async def main() -> list[float]:
    model = art.TrainableModel(name="tictactoe", project="ruler", base_model=BASE_MODEL)
    backend = LocalBackend()
    await model.register(backend)
    learning_rates = []
    end = await model.get_step() + STEPS
    while await model.get_step() < end:
        groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(model, q) for _ in range(3)) for q in ("a1", "b2")),
            after_each=judge,
        )
        for trajectory in groups[0]:
            side: art.MessagesAndChoices = [{"role": "user", "content": "sub"}]
            side.append(await ask(model, side))
            trajectory.additional_histories.append(History(messages_and_choices=side))
        result = await backend.train(model, groups, learning_rate=1e-3)
        await model.log(groups, metrics=result.metrics, step=result.step, split="train")
        learning_rates.append(result.metrics["loss/learning_rate"])
    await backend.close()
    return learning_rates
