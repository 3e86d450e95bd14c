"""Adapters on experts: what they compute, their gradients, their files, and what vLLM's loader makes of these."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.config import ConfigError, TrainerConfig
from pipeline.config.checks import check_trainer
from tests.kits.settings import with_values
from tests.trainer.engine.kit import batch
from tests.trainer.engine.test_families import conversations
from tests.trainer.engine.test_optimizer import stored
from tests.trainer.families import make
from tests.trainer.kit import stir
from trainer.batches.packing import padded, prefix_shared
from trainer.checkpoints.compatibility import require_compatible
from trainer.checkpoints.tensors import adapter_files
from trainer.commands.export import write_merged
from trainer.engine.engine import Engine
from trainer.engine.experts import IN_VLLM
from trainer.engine.loading import base_digest

FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "qwen2_moe", "gpt_oss")
SETTINGS = {"lora.rank": 4, "lora.experts": True}
SCALE = 16 / 4

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp(request.param)
    config = with_values(TrainerConfig(), SETTINGS | {"dtype": "float64"})
    return Engine(make(request.param, folder), config)


def base_of(engine: Engine) -> Any:
    """Its base model, without an adapter."""
    base = AutoModelForCausalLM.from_pretrained(engine.model.base, dtype=torch.float64).eval()
    base.set_experts_implementation("eager")  # PyTorch's grouped product has no float64
    return base


def merged_by_hand(base: Any, adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of `base` with an adapter's products added, expert by expert."""
    weights = dict(base.named_parameters())
    for name, a in adapter.items():
        if ".lora_A." not in name:
            continue
        b = adapter[name.replace("lora_A", "lora_B")]
        place = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        place = place.replace("block_sparse_moe", "mlp")
        if not place.endswith((".experts", ".experts.base_layer")):
            weights[f"{place}.weight"] = weights[f"{place}.weight"] + SCALE * b @ a
            continue
        place = place.removesuffix(".base_layer") + (".gate_up_proj" if place.endswith("base_layer") else ".down_proj")
        stack, rank = weights[place], len(a) // len(weights[place])
        products = [SCALE * b[:, e :: len(stack)] @ a[e * rank : (e + 1) * rank] for e in range(len(stack))]
        transposed = base.config.model_type == "gpt_oss"  # its experts are stored [in, out]
        weights[place] = stack + torch.stack([p.T if transposed else p for p in products])
    return weights


def test_every_expert_computes_with_its_own_product_in_value_and_gradient(engine: Engine) -> None:
    stir(engine)
    plain, groups = conversations()
    base = base_of(engine)
    adapter = {n: t.requires_grad_() for n, t in engine.model.weights().items()}
    weights = merged_by_hand(base, adapter)
    total = torch.zeros((), dtype=torch.float64)
    for s in plain:
        ids = torch.from_numpy(s.ids.astype(np.int64))[None]
        logits = torch.func.functional_call(base, weights, kwargs={"input_ids": ids, "use_cache": False}).logits[0]
        at = torch.from_numpy(np.flatnonzero(s.loss_mask))
        total = total + (logits[at - 1] / 0.7).log_softmax(-1).gather(1, ids[0, at, None]).sum()
    total.backward()
    shape = (len(plain), max(s.trained_tokens for s in plain))
    for layout in (padded(plain), prefix_shared(plain, groups)):
        engine.model.peft.zero_grad(set_to_none=True)
        mine = engine.model.logprobs(layout, shape)[0].sum()
        mine.backward()
        # transformers computes norms in float32.
        assert float(mine) == pytest.approx(float(total), rel=1e-5)
        for name, tensor in engine.model._live.items():
            mine_at, theirs = tensor_gradient(engine, tensor), adapter[name].grad
            assert theirs is not None
            torch.testing.assert_close(mine_at, theirs, rtol=1e-4, atol=1e-5 * max(1.0, float(theirs.abs().max())))


def test_without_its_adapter_it_is_the_base_model(engine: Engine) -> None:
    """The KL divergence from the base model, and a teacher that is the base model, need it."""
    stir(engine)
    plain = conversations()[0][:1]
    base = base_of(engine)
    ids = torch.from_numpy(plain[0].ids.astype(np.int64))[None]
    at = torch.from_numpy(np.flatnonzero(plain[0].loss_mask))
    with torch.no_grad():
        own = (base(input_ids=ids).logits[0, at - 1] / 0.7).log_softmax(-1).gather(1, ids[0, at, None])[:, 0]
        with engine.model.peft.disable_adapter():
            without = engine.model.logprobs(padded(plain), (1, len(at)))[0][0]
        adapted = engine.model.logprobs(padded(plain), (1, len(at)))[0][0]
    torch.testing.assert_close(without, own, rtol=0, atol=1e-5)
    assert float((adapted - own).abs().max()) > 0.1
    # Versions with and without an adapter on experts have the same base.
    assert base_digest(engine.model.base, base) == engine.model.base_digest


def tensor_gradient(engine: Engine, view: torch.Tensor) -> torch.Tensor:
    """The gradient of the parameter that `view` shows."""
    (parameter,) = (p for p in engine.model.parameters if p.data_ptr() == view.data_ptr())
    assert parameter.grad is not None
    return parameter.grad


def test_a_resumed_step_is_the_same_and_trains_the_experts(engine: Engine, tmp_path: Path) -> None:
    stir(engine)  # the B of a fresh adapter is zero, and its A has no gradient
    state = engine.initial_state()
    batches = [batch(engine, state, seed=20 * i) for i in range(2)]
    first = engine.step(state, batches[0], [0] * 6).state
    of_experts = [n for n in first.weights if "experts" in n]
    assert len(of_experts) == 8  # A and B, of two parameters in two layers
    assert not any(torch.equal(first.weights[n], state.weights[n]) for n in of_experts)
    through = engine.step(first, batches[1], [0] * 6).state
    again = engine.step(stored(first, engine), batches[1], [0] * 6).state
    for name, weight in through.weights.items():
        torch.testing.assert_close(again.weights[name], weight, rtol=0, atol=1e-6)
    files = adapter_files(first.weights, engine.model.lora, "base")
    require_compatible(None, files, "", engine.model.lora)
    without = copy.copy(engine.model.lora)
    without.target_parameters = None
    with pytest.raises(ConfigError, match=r"trainer\.lora\.experts: a was trained with \[.*\], not with None"):
        require_compatible(None, files, "", without, "a")


def test_an_export_is_merged_into_the_experts(engine: Engine, tmp_path: Path) -> None:
    stir(engine)
    adapter = engine.model.weights()
    write_merged(adapter_files(adapter, engine.model.lora, engine.model.base), engine.model.base, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(engine.model.base, dtype=torch.float64)
    expected = merged_by_hand(base, adapter)
    merged = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).named_parameters())
    for name, weight in expected.items():
        torch.testing.assert_close(merged[name], weight, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_vllms_loader_gives_every_expert_its_own_product(tmp_path: Path) -> None:
    """vLLM's CPU build serves no adapters on experts: this is its loader up to the tensors that its kernel reads."""
    pytest.importorskip("vllm")
    arguments, expected = [], {}
    for family in FAMILIES:
        base_folder, folder = tmp_path / family, tmp_path / f"{family}-adapter"
        folder.mkdir()
        engine = Engine(make(family, base_folder), with_values(TrainerConfig(), SETTINGS))
        stir(engine)
        adapter = engine.model.weights()
        for name, content in adapter_files(adapter, engine.model.lora, engine.model.base).items():
            (folder / name).write_bytes(content)
        base = AutoModelForCausalLM.from_pretrained(engine.model.base)
        plain, merged = dict(base.named_parameters()), merged_by_hand(base, adapter)
        for i, layer in enumerate(base.model.layers):
            place = next(n for n, m in layer.named_modules() if n.endswith(".experts"))
            deltas = [
                (merged[n] - plain[n]).detach()
                for n in (f"model.layers.{i}.{place}.{leaf}" for leaf in ("gate_up_proj", "down_proj"))
            ]
            gate_up, down = (d.mT for d in deltas) if family == "gpt_oss" else deltas
            half = gate_up.shape[1] // 2
            split = (gate_up[:, ::2], gate_up[:, 1::2]) if family == "gpt_oss" else gate_up.split(half, dim=1)
            expected |= {(family, f"{i}.{n}"): t for n, t in zip(("gate", "up", "down"), (*split, down), strict=True)}
        arguments += [family, str(folder), *map(str, (len(down), down.shape[1], down.shape[2]))]
    out = tmp_path / "out.pt"
    child = [sys.executable, "-m", "tests.trainer.engine.vllm_experts_child", str(out), *arguments]
    done = subprocess.run(child, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    loaded = torch.load(out)
    assert {(family, name) for family, layers in loaded.items() for name in layers} == expected.keys()
    for (family, name), delta in expected.items():
        assert float(delta.abs().max()) > 0.01
        torch.testing.assert_close(loaded[family][name], delta, rtol=0, atol=1e-5)


def test_only_families_compared_with_vllm_get_adapters_on_experts(tmp_path: Path) -> None:
    assert set(FAMILIES) == set(IN_VLLM)
    with pytest.raises(ConfigError, match=r"trainer\.lora\.experts: the experts of glm4_moe can't .* set it to false"):
        Engine(make("glm4_moe", tmp_path), with_values(TrainerConfig(), SETTINGS))
    with pytest.raises(ConfigError, match=r"trainer\.lora\.experts: the experts of qwen3 can't"):
        Engine(make("qwen3", tmp_path / "q"), with_values(TrainerConfig(), SETTINGS))


def test_a_model_whose_experts_peft_would_leave_out_is_refused(tmp_path: Path) -> None:
    base = make("qwen3_moe", tmp_path, mlp_only_layers=[0, 1])
    with pytest.raises(ConfigError, match=r"trainer\.lora\.experts: this qwen3_moe has no experts in floating"):
        Engine(base, with_values(TrainerConfig(), SETTINGS))


@pytest.mark.parametrize("other", [{"engine": "unsloth"}, {"memory.sharded": True}], ids=str)
def test_what_can_not_train_experts_is_refused_at_start(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lora\.experts: .* can't be trained with .* take trainer\.engine"):
        check_trainer(with_values(TrainerConfig(), SETTINGS | other))
