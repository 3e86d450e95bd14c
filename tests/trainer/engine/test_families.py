"""Every family of causal LM trains right, whatever its head, its windows and its layers, or is refused with the
reason."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from pipeline.config import ConfigError, LoraConfig, MemoryConfig, TrainerConfig
from tests.kits.settings import with_values
from tests.trainer.families import ROWS, SHARED, VOCAB, make
from tests.trainer.kit import backward, sequence, stir
from trainer.batches.examples import Example
from trainer.batches.packing import AttentionSpan, padded, prefix_shared
from trainer.engine import forward, verify
from trainer.engine.engine import Engine
from trainer.engine.forward import Forward
from trainer.sequences import TokenSequence

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

FLOAT32 = 1e-4
"""Logits here are of size 2 to 10 and come of a few hundred float32 terms: 1e-5 is measured at the most."""


def engine_of(family: str, folder: Path, changed: dict[str, Any] | None = None, **settings: Any) -> Engine:
    return Engine(make(family, folder, **changed or {}), with_values(TrainerConfig(), {"lora.rank": 4, **settings}))


def conversations() -> tuple[list[TokenSequence], list[int]]:
    """Two groups of branches, longer than the families' windows of 8 tokens."""
    rng = np.random.default_rng(5)
    out, groups = [], []
    for group in range(2):
        prompt, reply = rng.integers(2, VOCAB, 20).tolist(), rng.integers(2, VOCAB, 6).tolist()
        for own in (4, 9, 2):
            ids = [*prompt, *reply, *rng.integers(2, VOCAB, own).tolist()]
            out.append(sequence(ids, list(range(20, len(ids))), temperature=0.7))
            groups.append(group)
    return out, groups


def own_logprobs(engine: Engine, s: TokenSequence) -> torch.Tensor:
    engine.model.peft.eval()
    try:
        logits = engine.model.peft(input_ids=torch.from_numpy(s.ids.astype(np.int64))[None], use_cache=False).logits
    finally:
        engine.model.peft.train()
    logprobs = torch.log_softmax(logits[0].float() / 0.7, -1)
    at = np.flatnonzero(s.loss_mask)
    return logprobs[at - 1, s.ids[at].astype(np.int64)]


@pytest.mark.parametrize("family", [*SHARED, *ROWS])
@pytest.mark.slow
def test_logprobs_and_gradients_are_the_models_own(family: str, tmp_path: Path) -> None:
    engine = engine_of(family, tmp_path)
    shares = family in SHARED
    assert engine.passes.verified.layout == ("prefix" if shares else "padded"), engine.passes.verified
    assert engine.passes.verified.padded.largest < FLOAT32
    stir(engine)  # an adapter that changes something
    sequences, groups = conversations()
    shape = (len(sequences), max(s.trained_tokens for s in sequences))
    with torch.no_grad():
        own = [own_logprobs(engine, s) for s in sequences]
    layouts = [padded(sequences), *([prefix_shared(sequences, groups)] if shares else [])]
    for layout in layouts:
        with torch.no_grad():
            out, entropies, _ = engine.model.logprobs(layout, shape)
        for row, want in zip(out, own, strict=True):
            torch.testing.assert_close(row[: len(want)], want, rtol=0, atol=FLOAT32)
        assert float(entropies.max()) <= np.log(VOCAB) + 1e-5
    # The gradient of the sum of all logprobs, by the model's own forward pass and by what is trained.
    engine.model.peft.zero_grad()
    torch.cat([own_logprobs(engine, s) for s in sequences]).sum().backward()
    wanted = [None if p.grad is None else p.grad.clone() for p in engine.model.parameters]
    engine.model.peft.zero_grad()
    engine.model.logprobs(layouts[-1], shape)[0].sum().backward()
    # A parameter's gradient is exact to a share of the largest: where a model is nearly blind to it, it is rounding.
    scale = max(float(g.abs().max()) for g in wanted if g is not None)
    for parameter, want in zip(engine.model.parameters, wanted, strict=True):
        if want is not None:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, want, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("family", ["granite", "cohere", "gemma2", "falcon_h1"])
def test_a_head_that_is_not_the_models_own_is_refused(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the last layer alone, without the scale or cap of the model's class."""

    def bare(self: Forward, hidden_nD: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model.get_output_embeddings()(hidden_nD)
        return out

    monkeypatch.setattr(Forward, "logits", bare)
    with pytest.raises(ConfigError, match=r"can't be trained: .* differ from the model's own by .* nats"):
        engine_of(family, tmp_path)


@pytest.mark.parametrize("family", ["bamba", "falcon_h1", "granitemoehybrid", "mamba2", "zamba2"])
def test_a_layer_whose_weight_a_fused_kernel_reads_gets_no_adapter(family: str, tmp_path: Path) -> None:
    """On CUDA, a training pass of a Mamba mixer hands `out_proj.weight` to a kernel, past PEFT's adapter."""
    engine = engine_of(family, tmp_path)
    assert "out_proj" not in engine.model.lora.target_modules
    assert "in_proj" in engine.model.lora.target_modules
    with pytest.raises(ConfigError, match=r"trainer\.lora\.targets: 0, out_proj can't have an adapter"):
        engine_of(family, tmp_path, **{"lora.targets": ("out_proj", "0")})


def test_a_training_pass_that_bypasses_an_adapter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter of the check is random: past a fresh one, whose output is zero, nothing would differ."""
    whole = Qwen3MLP.forward

    def fused(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            out: torch.Tensor = whole(self, x)
            return out
        last = self.get_submodule("down_proj")
        return torch.nn.functional.linear(self.act_fn(self.gate_proj(x)) * self.up_proj(x), last.weight)

    monkeypatch.setattr(Qwen3MLP, "forward", fused)
    with pytest.raises(ConfigError, match=r"can't be trained: .* differ from the model's own by .* nats"):
        engine_of("qwen3", tmp_path)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "mistral", "llama4_text"])
def test_a_mask_without_the_models_window_is_not_used(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: one mask for all layers, so that layers with a window saw everything."""
    original = forward.attention_spans

    def blind(config: Any) -> Any:
        return {kind: AttentionSpan() for kind in original(config) or {}}

    monkeypatch.setattr(forward, "attention_spans", blind)
    base = make(family, tmp_path)
    verified = Engine(base, TrainerConfig(lora=LoraConfig(rank=4))).passes.verified
    assert verified.prefix_shared is not None
    assert verified.prefix_shared.largest > 0.1
    assert verified.layout == "padded"
    assert "differ from the model's own" in verified.why_padded
    with pytest.raises(ConfigError, match=r"trainer\.memory\.packing: prefixes can't be shared"):
        Engine(base, TrainerConfig(lora=LoraConfig(rank=4), memory=MemoryConfig(packing="prefix")))


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("gpt2", {"attn_pdrop": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3}),
        ("llama", {"attention_dropout": 0.5}),
        ("qwen3_moe", {"output_router_logits": True}),
        ("granite", {"attention_dropout": 0.5}),
    ],
)
def test_training_has_no_dropout_and_no_router_loss(family: str, changed: dict[str, Any], tmp_path: Path) -> None:
    """The sampler has no dropout, and a router's own loss is not the policy's."""
    engine = engine_of(family, tmp_path, changed)
    assert engine.passes.verified.padded.largest < FLOAT32
    sequences, groups = conversations()
    examples = [Example(s, 1.0) for s in sequences]
    losses = [backward(engine, examples, groups, 0)["loss"] for _ in range(2)]
    assert losses[0] == losses[1]


def test_a_bfloat16_model_is_compared_in_float32_and_keeps_its_weights(tmp_path: Path) -> None:
    """Rounding alone moved the logprobs of a small real model by more than the bound for some adapters."""
    engine = engine_of("qwen3", tmp_path, dtype="bfloat16")
    verified = engine.passes.verified
    assert (verified.layout, verified.attention) == ("prefix", "sdpa")
    assert verified.prefix_shared is not None
    assert max(verified.padded.largest, verified.prefix_shared.largest) < 1e-4
    base = AutoModelForCausalLM.from_pretrained(engine.model.base, dtype=torch.bfloat16)
    loaded = dict(engine.model.peft.get_base_model().named_parameters())
    for name, weight in base.named_parameters():
        mine = loaded.get(name, loaded.get(f"{name.removesuffix('.weight')}.base_layer.weight"))
        assert mine is not None
        assert mine.dtype == torch.bfloat16
        assert torch.equal(mine, weight)


def test_bfloat16_has_its_own_logprob_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("qwen3_moe", tmp_path, dtype="bfloat16")
    assert verify.logprob_bound_for(engine.config, engine.model.dtype) == 0.08
    # How far off it is depends on the processor, so the rule is tested on figures of its own.
    one_token_elsewhere = verify.Difference(mean=0.05, largest=2.0)
    assert one_token_elsewhere.within_bound(engine.config, torch.bfloat16)
    assert not one_token_elsewhere.within_bound(engine.config, torch.float32)
    assert not verify.Difference(mean=0.1, largest=0.2).within_bound(engine.config, torch.bfloat16)
    monkeypatch.setattr(verify, "_difference", lambda *_: verify.Difference(mean=1e-7, largest=1e-6))
    with pytest.raises(ConfigError, match=r"trainer\.logprob_bound is 1e-07"):
        engine_of("qwen3", tmp_path / "other", logprob_bound=1e-7)
