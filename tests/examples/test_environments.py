"""The recipes of verifiers' environments are settings that the services take."""

import json
from pathlib import Path

import pytest

from examples.environments.demo import SETTINGS, settings_of, small
from examples.environments.recipes import RECIPES
from pipeline.config import load


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_recipe_is_a_valid_installation(name: str, on_gpu: bool, tmp_path: Path) -> None:
    recipe = RECIPES[name] if on_gpu else small(RECIPES[name], str(tmp_path))
    settings = settings_of(name, recipe, on_gpu=on_gpu)
    config = load(SETTINGS, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    (model,) = config.models
    trainer = config.trainer_of(model)
    assert (model.name, trainer.max_steps, trainer.lora.rank) == (name, recipe.steps, recipe.rank)
    assert config.vllm.max_lora_rank >= trainer.lora.rank
    assert config.judge.group_size == recipe.group_size
    # The reply fits beside a prompt.
    assert recipe.max_tokens < recipe.max_model_len
