"""ART's options of a model and of a step, as settings of the installation."""

import json
from typing import Any

import pytest

import journeywork.art as art
from journeywork.art.dev import InternalModelConfig, loss_settings, settings_of, step_settings
from pipeline.config import load


@pytest.mark.parametrize(
    ("config", "expected", "without_effect"),
    [
        (
            {"init_args": {"max_seq_length": 512, "load_in_4bit": True}},
            {"vllm.max_model_len": 512, "trainer.memory.quantization": "4bit"},
            [],
        ),
        (
            {"engine_args": {"tensor_parallel_size": 2, "enforce_eager": True, "gpu_memory_utilization": 0.5}},
            {"vllm.args": ["--gpu-memory-utilization", "0.5", "--tensor-parallel-size", "2", "--enforce-eager"]},
            [],
        ),
        (
            {"engine_args": {"max_model_len": 512, "enforce_eager": False, "num_scheduler_steps": 1}},
            {"vllm.max_model_len": 512, "vllm.args": ["--no-enforce-eager"]},
            ["num_scheduler_steps"],
        ),
        ({"rollout_weights_mode": "merged"}, {}, ["rollout_weights_mode"]),
    ],
)
def test_options_of_a_model_become_settings_that_an_installation_takes(
    config: InternalModelConfig, expected: dict[str, object], without_effect: list[str]
) -> None:
    assert settings_of(config) == (expected, without_effect)
    settings = [f"{name}={json.dumps(value)}" for name, value in expected.items()]
    assert load(None, ['models.0.name="m"', 'models.0.base="b"', *settings])


def test_an_option_of_the_loss_chooses_arts_whole_loss_and_others_change_nothing() -> None:
    assert step_settings(None, {}) == {}
    assert step_settings(0.1, {"verbose": True, "logprob_calculation_chunk_size": 8, "kl_ref_adapter_path": None}) == {
        "optimizer.learning_rate": 0.1
    }
    assert step_settings(None, {"loss_fn": "cispo"}) == loss_settings()
    assert step_settings(None, {"kl_penalty_coef": 0.3}) == loss_settings() | {"loss.kl_penalty": 0.3}


@pytest.mark.parametrize("options", [{"loss_fn": "ppo"}, {"epsilon": 0.5}, {"adam_params": 1}, {"learnig_rate": 1}])
def test_what_a_step_cannot_choose_is_refused(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(art.UnsupportedError, match=f"can't honour {name}={value!r}: set trainer.loss or"):
        step_settings(None, options)
