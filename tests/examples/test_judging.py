"""What the examples that a judge directs say when there is nothing to train on or to compare."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

import journeywork.art as art
from examples.common import judged

pytestmark = pytest.mark.anyio

HELPER = judged.Helper("judge", "http://127.0.0.1:9/v1", "none")


@pytest.fixture
def model() -> art.TrainableModel[Any]:
    return art.TrainableModel(name="m", project="p", base_model="tiny")


async def rollout(task: str, version: str) -> art.Trajectory:
    return art.Trajectory(messages_and_choices=[{"role": "user", "content": task}], reward=0.0)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that scores nothing."""

    async def score(self: judged.Helper, group: art.TrajectoryGroup) -> None:
        return None

    monkeypatch.setattr(judged.Helper, "score", score)


@pytest.mark.usefixtures("silent")
async def test_a_judge_that_is_down_ends_the_training_with_a_word_about_it(
    model: art.TrainableModel[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"step 1: the judge, judge at .*/v1, scored no group"):
        await judged.train(model, ["a", "b"], rollout, HELPER, steps=1, groups=2, size=2)

    async def step(self: Any) -> int:
        return 1

    monkeypatch.setattr(art.TrainableModel, "get_step", step)
    with pytest.raises(SystemExit, match=r"comparison: the judge, .* scored no group"):
        await judged.compare(model, ["a"], rollout, HELPER)


@pytest.mark.parametrize("held_out", [0, 2, 3])
async def test_scenarios_are_needed_on_both_sides(model: art.TrainableModel[Any], held_out: int) -> None:
    args = argparse.Namespace(held_out=held_out, steps=1)
    with pytest.raises(SystemExit, match=f"--held-out {held_out} of 2 scenarios"):
        await judged.train_and_compare(args, model, ["a", "b"], rollout, HELPER, 1e-5)
