"""Steps of several updates over one batch: epochs and minibatches, as in PPO."""

from typing import Any

import pytest
import torch

from pipeline.config import LoraConfig, OptimizerConfig, TrainerConfig
from tests.kits.settings import with_values
from tests.trainer.engine.kit import Configure, batch
from tests.trainer.kit import backward
from trainer.batches.examples import Example
from trainer.engine.engine import Engine, updates_of
from trainer.engine.passes import Passes

GROUPS = [0, 0, 1, 1, 2, 2]


def test_every_epoch_trains_every_group_once_and_groups_stay_whole() -> None:
    config = with_values(TrainerConfig(), {"optimizer.epochs": 3, "optimizer.minibatches": 2})
    groups = [0, 0, 1, 2, 2, 2, 3, 4]
    updates = list(updates_of(groups, config, step=5))
    assert len(updates) == 6
    for first, second in zip(updates[::2], updates[1::2], strict=True):
        assert sorted([*first, *second]) == list(range(8))
        assert not {groups[i] for i in first} & {groups[i] for i in second}
    assert updates == list(updates_of(groups, config, step=5))  # a repeated step is the same step
    assert len({tuple(u) for u in updates}) > 2  # dealt out anew
    assert [len(list(updates_of([0, 0], config, 1)))] == [3]  # one group: one minibatch


@pytest.mark.parametrize("correction", ["none", "token_truncate"])
def test_a_step_of_several_updates_equals_a_literal_loop(
    engine: Engine, configured: Configure, correction: str
) -> None:
    """The same weights as a plain loop of AdamW over the minibatches, with the logprobs of the start held fixed."""
    settings = {"loss.importance_sampling": correction, "optimizer.epochs": 2, "optimizer.minibatches": 2}
    configured(settings)
    state = engine.initial_state()
    examples = batch(engine, state)
    result = engine.step(state, examples, GROUPS)

    engine.model.load_adapter(state.weights)
    start = engine.passes.logprobs(examples, GROUPS)
    held = [Example(e.sequence, e.advantage, old_logprobs=start[i]) for i, e in enumerate(examples)]
    optimizer = torch.optim.AdamW(engine.model.parameters, lr=1e-2, weight_decay=0.0)
    for update in updates_of(GROUPS, engine.config, 0):
        optimizer.zero_grad()
        backward(engine, [held[i] for i in update], [GROUPS[i] for i in update], 0)
        torch.nn.utils.clip_grad_norm_(engine.model.parameters, 1.0)
        optimizer.step()
    for name, tensor in engine.model.weights().items():
        torch.testing.assert_close(result.state.weights[name], tensor, rtol=1e-9, atol=1e-12)
    assert result.metrics["updates"] == 4
    assert result.state.step == 1


def test_the_clip_acts_from_the_second_update_on(engine: Engine, configured: Configure) -> None:
    state = engine.initial_state()
    examples = batch(engine, state)
    configured({"loss.epsilon": 1e-3, "check_share": 1.0})
    once = engine.step(state, examples, GROUPS).metrics
    configured({"loss.epsilon": 1e-3, "check_share": 1.0, "optimizer.epochs": 4})
    often = engine.step(state, examples, GROUPS).metrics
    assert once["clip_ratio/region_mean"] == 0
    assert often["clip_ratio/region_mean"] > 0.1
    # What a step says of the sampler is measured before its first update.
    for name in ("ratio_max", "kl_sampler", "on_policy_logprob_diff_max", "tokens", "sequences"):
        assert often[name] == pytest.approx(once[name], abs=1e-6), name
    assert often["tokens_forward"] == 4 * once["tokens_forward"]


def test_a_sequence_that_does_not_fit_is_left_out_of_every_update(
    engine: Engine, configured: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds the pass without gradients and not the one with them; with a minibatch to itself there is nothing
    to update."""
    configured({"optimizer.epochs": 2, "optimizer.minibatches": 3, "memory.packing": "padded"})
    state = engine.initial_state()
    examples = batch(engine, state)
    large = [examples[2].sequence, examples[3].sequence]
    original = Passes._backward

    def limited(self: Passes, micro_batch: Any, inside: Any, *args: Any) -> None:
        if any(inside[i].sequence is s for i in micro_batch.indices for s in large):
            raise torch.OutOfMemoryError("too much")
        original(self, micro_batch, inside, *args)

    monkeypatch.setattr(Passes, "_backward", limited)
    result = engine.step(state, examples, GROUPS)
    assert {id(s) for s in result.dropped} == {id(s) for s in large}
    assert (result.metrics["updates"], result.metrics["sequences"]) == (4, 4)
    assert all(bool(torch.isfinite(w).all()) for w in result.state.weights.values())


def test_gradients_use_the_rounded_adapter_and_small_updates_accumulate(tiny_base: str) -> None:
    """With `lora.dtype` = bfloat16 the trainer's logprobs are those of the published weights, and float32 weights
    take updates that are smaller than a step of bfloat16."""
    config = TrainerConfig(
        lora=LoraConfig(rank=4, dtype="bfloat16"), optimizer=OptimizerConfig(learning_rate=2e-5), dtype="float32"
    )
    engine = Engine(tiny_base, config)
    start = state = engine.initial_state()
    for i in range(3):
        result = engine.step(state, batch(engine, state, seed=10 * i), [0] * 6)
        assert result.metrics["on_policy_logprob_diff_max"] < 1e-5  # float32 sums in another order
        state = result.state
        assert state.master is not None
        for name, tensor in state.weights.items():
            assert tensor.dtype == torch.bfloat16
            assert state.master[name].dtype == torch.float32
            assert torch.equal(state.master[name].to(torch.bfloat16), tensor)
    # Where the published weight is still that of the start, the master has moved: the update was not lost.
    assert start.master is not None
    a = [name for name in state.weights if "lora_A" in name]
    kept = [(state.weights[n] == start.weights[n]) & (state.master[n] != start.master[n]) for n in a]
    assert all(float(k.float().mean()) > 0.5 for k in kept)
