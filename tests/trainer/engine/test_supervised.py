"""Supervised fine-tuning (`trainer.loss.type = "sft"`) against its literal formula."""

import numpy as np
import torch

from pipeline.config import LoraConfig, TrainerConfig
from tests.kits.settings import with_values
from tests.trainer import kit
from trainer.batches.examples import make_examples
from trainer.engine.engine import Engine
from trainer.sequences import build

REWARDS = ((1.0,), (1.0, 0.25, -0.5))


def test_the_gradient_is_that_of_the_weighted_mean_negative_logprob(tiny_base: str) -> None:
    """Also with settings of other losses, equal rewards, one member, and recorded logprobs, which are not used."""
    settings = {"loss.type": "sft", "loss.beta": 0.5, "loss.kl_penalty": 0.2, "loss.entropy_coef": 0.1}
    config = with_values(TrainerConfig(dtype="float64", lora=LoraConfig(rank=4)), settings)
    engine = kit.exactly(Engine(tiny_base, config))
    kit.stir(engine)
    groups, total, literal = [], 0, torch.zeros((), dtype=torch.float64)
    for g, rewards in enumerate(REWARDS):
        sequences = []
        for i, reward in enumerate(rewards):
            prompt, reply = [5, 6, 7 + i], list(range(9, 12 + i + g))
            exchange = kit.exchange(f"g{g}-{i}", 0, prompt, reply, logprobs=[-9.0] * len(reply) if i else [])
            sequences += build(f"g{g}-{i}", [exchange])
            logits = engine.model.peft(input_ids=torch.tensor([prompt + reply])).logits[0]
            logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            literal = literal - reward * logprobs[torch.arange(len(reply)), torch.tensor(reply)].sum()
            total += len(reply)
        groups.append(kit.training_group(kit.group(f"g{g}", rewards), sequences, g + 1))
    (literal / total).backward()
    expected = [p.grad.clone() for p in engine.model.parameters]
    engine.model.peft.zero_grad()
    batch = make_examples(groups, config)
    metrics = kit.backward(engine, batch, [0, 1, 1, 1], 0)
    assert np.isclose(metrics["loss"], float(literal.detach()) / total, rtol=1e-10, atol=0)
    for parameter, gradient in zip(engine.model.parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12)
