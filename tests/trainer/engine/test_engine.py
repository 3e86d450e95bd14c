"""Engine: steps, their measurements, and lines of several policies over one model."""

import copy
import dataclasses
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from pipeline.config import ConfigError, LoraConfig, ModelConfig, TrainerConfig
from pipeline.config.trainer import LossType
from tests.kits.settings import with_values
from tests.trainer.engine.kit import batch
from tests.trainer.kit import VOCAB, backward, settings, stir
from trainer.engine.engine import Engine
from trainer.engine.model import load_settings


def test_an_abandoned_step_does_not_change_the_state(engine: Engine) -> None:
    start = engine.step(engine.initial_state(), batch(engine, engine.initial_state()), [0] * 6).state
    kept = copy.deepcopy(start)
    examples = batch(engine, start, seed=30)
    first = engine.step(start, examples, [0] * 6).state
    engine.step(start, batch(engine, start, seed=60), [0] * 6)  # computed and thrown away
    again = engine.step(start, examples, [0] * 6).state
    for name, tensor in kept.weights.items():
        torch.testing.assert_close(start.weights[name], tensor, rtol=0, atol=0)
        torch.testing.assert_close(first.weights[name], again.weights[name], rtol=0, atol=0)
    assert first.step == again.step == 2


@pytest.mark.parametrize("loss", [*get_args(LossType), "sft"])
@pytest.mark.parametrize("sampled", ["plainly", "with cuts"])
def test_logits_of_large_vocabularies_are_computed_in_chunks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, loss: str, sampled: str
) -> None:
    """Loss, KL term and entropy bonus are those of all logits at once, for every loss."""
    examples = batch(engine, engine.initial_state())
    if sampled == "with cuts":
        cuts = np.tile(np.array([20, 0.95, 0.0], np.float32), (len(examples[0].sequence.ids), 1))
        examples = [dataclasses.replace(e, sequence=dataclasses.replace(e.sequence, cuts=cuts)) for e in examples]
    before = engine.config
    engine.configure(with_values(before, {"loss.type": loss, "loss.beta": 0.1, "loss.entropy_coef": 0.05}))
    stir(engine)

    def results() -> tuple[dict[str, float], list[torch.Tensor]]:
        engine.model.peft.zero_grad()
        metrics = backward(engine, examples, [0] * 6, 0)
        return metrics, [p.grad.clone() for p in engine.model.parameters]

    try:
        metrics, whole = results()
        monkeypatch.setattr("trainer.engine.model._MAX_LOGITS", 4 * VOCAB)
        chunked_metrics, chunked = results()
    finally:
        engine.configure(before)
    assert chunked_metrics == pytest.approx(metrics, rel=1e-9, nan_ok=True)
    assert any(bool(g.any()) for g in whole)
    for mine, other in zip(chunked, whole, strict=True):
        torch.testing.assert_close(mine, other)


def test_policies_share_an_engine_only_if_the_model_is_loaded_with_equal_settings(
    tiny_base: str, tmp_path: Path
) -> None:
    def engines(**changed: Any) -> int:
        base = settings(tiny_base, tmp_path)
        one, other = (ModelConfig(name="a", base=tiny_base), ModelConfig(name="b", base=tiny_base, trainer=changed))
        return 1 if load_settings(base.trainer_of(one)) == load_settings(base.trainer_of(other)) else 2

    assert engines(groups_per_step=7, optimizer={"learning_rate": 1.0}) == 1
    for name, value in (
        ("dtype", "bfloat16"),
        ("memory", {"quantization": "4bit"}),
        ("unsloth", {"max_seq_length": 9}),
        ("lora", {"targets": ["q_proj"]}),
    ):
        assert engines(**{name: value}) == 2, value
    engine = Engine(tiny_base, TrainerConfig(lora=LoraConfig(rank=4, targets=("q_proj", "v_proj"))))
    assert {n.split(".")[-3] for n in engine.model.weights()} == {"q_proj", "v_proj"}
    with pytest.raises(ValueError, match=r"does not fit the model: 8 tensors .*such as base_model\..*lora\.rank"):
        engine.model.load_adapter({name: weight[:1] for name, weight in engine.model.weights().items()})
    with pytest.raises(ConfigError, match=r"dtype, lora\.targets can't be changed once the model is loaded"):
        engine.configure(TrainerConfig(dtype="bfloat16", lora=LoraConfig(rank=4)))
    with pytest.raises(
        ConfigError,
        match=r"lora\.targets: q_prj can't have an adapter; layers of this model that can: down_proj, gate_proj",
    ):
        Engine(tiny_base, TrainerConfig(lora=LoraConfig(targets=("q_prj",))))
