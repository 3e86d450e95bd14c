"""How a token was sampled, by the request and the server's defaults; unsupported settings are counted."""

import ast
import importlib.util
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.chat.sampling import NO_DEFAULTS, UNREADABLE, Defaults, sampling_of
from pipeline.config import LoraConfig, LossConfig, TrainerConfig, VllmConfig
from tests.trainer.kit import VOCAB, backward, exactly, exchange, stir
from trainer.batches import sampling
from trainer.batches.examples import Example
from trainer.batches.packing import padded, prefix_shared
from trainer.batches.sampling import defaults_of, restrict
from trainer.engine.engine import Engine
from trainer.sequences import build


def asked(**settings: Any) -> bytes:
    return json.dumps({"messages": [], **settings}).encode()


def test_the_request_comes_before_the_servers_default() -> None:
    defaults = Defaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1)
    found = sampling_of(asked(), defaults)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.6, 0.95, 20, 0.1)
    found = sampling_of(asked(temperature=1.2, top_p=1, top_k=-1, min_p=0), defaults)
    assert (found.temperature, found.top_p, found.top_k, found.unsupported) == (1.2, 1.0, 0, "")


def test_a_very_low_temperature_is_the_one_that_vllm_samples_at() -> None:
    found = [sampling_of(asked(temperature=t), NO_DEFAULTS) for t in (0.02, 0.0099, 2e-5, 0)]
    assert [(f.temperature, f.greedy) for f in found] == [(0.02, False), (0.01, False), (0.01, False), (0, True)]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"no json",
        b"",
        asked(temperature="warm"),
        asked(bad_words="x"),
        b'{"temperature": 0.5, "a_url": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
    ids=["no json", "empty", "a text", "no list", "deep"],
)
def test_a_call_whose_settings_are_unknown_is_not_trained(request_bytes: bytes) -> None:
    assert sampling_of(request_bytes, NO_DEFAULTS).unsupported == UNREADABLE


@pytest.mark.parametrize(
    ("setting", "value", "neutral"),
    [
        ("repetition_penalty", 1.05, 1.0),
        ("presence_penalty", 0.5, 0),
        ("frequency_penalty", -0.5, 0),
        ("logit_bias", {"7": 5}, {}),
        ("bad_words", ["x"], []),
        ("allowed_token_ids", [1], None),
        ("min_tokens", 3, 0),
        ("thinking_token_budget", 0, None),
    ],
)
def test_sampling_settings_that_the_trainer_can_not_compute_are_named(setting: str, value: Any, neutral: Any) -> None:
    assert sampling_of(asked(**{setting: value}), NO_DEFAULTS).unsupported == setting
    assert sampling_of(asked(**{setting: neutral}), NO_DEFAULTS).unsupported == ""


def test_tokens_under_a_penalty_are_context_and_counted() -> None:
    free = exchange("t", 0, [5, 6], [7, 8, 9], request=asked())
    bent = exchange("t", 1, [5, 6, 7, 8, 9, 10], [11, 12], request=asked(presence_penalty=1.0))
    left_out: Counter[str] = Counter()
    (sequence,) = build("t", [free, bent], left_out=left_out)
    assert sequence.ids.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert np.flatnonzero(sequence.loss_mask).tolist() == [2, 3, 4]
    assert left_out == {"presence_penalty": 2}
    assert build("t", [free], defaults=Defaults(repetition_penalty=1.05), left_out=left_out) == []
    assert left_out["repetition_penalty"] == 3


def test_the_servers_defaults_are_those_of_the_models_repository(tiny_base: str, tmp_path: Path) -> None:
    """Of a hub name too: transformers loads generation_config.json with the model, from wherever the model comes."""
    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    assert defaults_of(model, {}) == NO_DEFAULTS
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": true, "eos_token_id": 1}'
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert defaults_of(model, {}) == Defaults(temperature=0.6, top_k=20, top_p=0.95)
    for args in (("--generation-config", "vllm"), ("--generation-config=vllm",), ("--generation_config", "vllm")):
        assert defaults_of(model, VllmConfig(args=args).flags) == NO_DEFAULTS
    for args in (
        ("--override-generation-config", '{"temperature": 1.0}'),
        ('--override_generation_config={"temperature": 1.0}', "--enforce-eager"),
        ("--override-generation-config.temperature", "1.0"),
    ):
        expected = Defaults(temperature=1.0, top_k=20, top_p=0.95)
        assert defaults_of(model, VllmConfig(args=args).flags) == expected
    one_key = VllmConfig(args=("--override_generation_config.top_k=5", "--override-generation-config.min_p", "0.1"))
    assert defaults_of(model, one_key.flags) == Defaults(temperature=0.6, top_k=5, top_p=0.95, min_p=0.1)


def function_of_vllm(file: str, name: str) -> Callable[..., torch.Tensor]:
    """A function of vLLM's source that needs PyTorch alone: importing vLLM takes ten seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = ast.parse(Path(spec.origin).with_name("v1").joinpath(file).read_text())
    (function,) = (n for n in source.body if isinstance(n, ast.FunctionDef) and n.name == name)
    namespace: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([function], []), file, "exec"), namespace)
    found: Callable[..., torch.Tensor] = namespace[name]
    return found


@pytest.mark.parametrize("likely", [1024, 8])
def test_top_k_top_p_and_min_p_cut_as_in_vllm(likely: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against vLLM's own code for top_k and top_p, and its definition of min_p; also where more than the tokens that
    are ordered first are likely."""
    monkeypatch.setattr(sampling, "_LIKELY", likely)
    cut = function_of_vllm("sample/ops/topk_topp_sampler.py", "apply_top_k_top_p_pytorch")
    torch.manual_seed(0)
    logits = torch.randn(40, VOCAB) * 2
    for bounds in (
        (5, 1.0, 0.0),
        (0, 0.7, 0.0),
        (0, 0.1, 0.0),
        (30, 0.9, 0.0),
        (0, 1.0, 0.2),
        (6, 0.8, 0.05),
        (0, 1.0, 0.0),
    ):
        top_k, top_p, min_p = bounds
        want = logits.clone()
        if min_p:
            likely = want.softmax(-1)
            want[likely < min_p * likely.max(-1, keepdim=True).values] = -torch.inf
        want = cut(want, torch.full((40,), top_k or VOCAB, dtype=torch.int32), torch.full((40,), top_p))
        # Targets that no cut removes.
        mine = restrict(logits, logits.argmax(-1), torch.tensor([bounds] * 40, dtype=torch.float32))
        assert torch.equal(mine, want), bounds
        assert (mine == -torch.inf).any() == (bounds != (0, 1.0, 0.0))
    # Bounds of its own for each row, and tokens that are as probable as the last one that stays.
    ties = logits.round()
    of_each = torch.tensor([(0, 0.7, 0.0), (7, 1.0, 0.0), (20, 0.95, 0.0), (0, 1.0, 0.0)] * 10)
    mine = restrict(ties, ties.argmax(-1), of_each)
    k_each = torch.where(of_each[:, 0] > 0, of_each[:, 0], VOCAB).int()
    kept = (mine > -torch.inf).sum(-1)
    want = cut(ties.clone(), k_each, of_each[:, 1].clone())
    assert torch.equal(kept, (want > -torch.inf).sum(-1))
    assert torch.equal(mine.sort(-1).values, want.sort(-1).values)


def test_a_token_that_the_policy_would_now_cut_keeps_its_logit() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    assert restrict(logits, torch.tensor([2]), torch.tensor([[1.0, 1.0, 0.0]])).tolist() == [[3.0, -torch.inf, 1.0]]


@pytest.mark.parametrize("packing", ["padded", "prefix"])
def test_logprobs_are_those_of_the_cut_distribution(tiny_base: str, packing: str) -> None:
    config = TrainerConfig(dtype="float64", lora=LoraConfig(rank=4), loss=LossConfig(entropy_coef=0.1))
    engine = exactly(Engine(tiny_base, config))
    stir(engine)
    request = asked(temperature=0.8, top_k=6, top_p=0.9)
    sequences = []
    for name in ("a", "b"):
        first = exchange(name, 0, [5, 6, 7], [8, 9], request=asked())
        second = exchange(name, 1, [5, 6, 7, 8, 9, 4], [10, ord(name) % VOCAB], request=request)
        sequences += build(name, [first, second])
    layout = padded(sequences) if packing == "padded" else prefix_shared(sequences, [0, 0])
    out, entropies, _ = engine.model.logprobs(layout, (2, 4))
    for row, s in zip(out, sequences, strict=True):
        ids = torch.from_numpy(s.ids.astype(np.int64))
        logits = engine.model.peft(input_ids=ids[None]).logits[0].detach()
        want = []
        for at in np.flatnonzero(s.loss_mask):
            scores = logits[at - 1]
            if at >= 6:
                scores = scores / 0.8
                scores = torch.where(scores < scores.topk(6).values[-1], -torch.inf, scores)
                order = scores.argsort()
                gone = order[scores[order].softmax(-1).cumsum(-1) <= 1 - 0.9]
                kept = scores[ids[at]] if scores[ids[at]] > -torch.inf else logits[at - 1, ids[at]] / 0.8
                scores[gone] = -torch.inf
                scores[ids[at]] = kept if scores[ids[at]] == -torch.inf else scores[ids[at]]
            want.append(scores.log_softmax(-1)[ids[at]])
        torch.testing.assert_close(row, torch.stack(want), rtol=0, atol=1e-6)  # top_p is a float32
    # Neither loss nor entropy bonus turns into NaN where a token has no probability.
    assert torch.isfinite(entropies).all()
    backward(engine, [Example(s, 1.0) for s in sequences], [0, 0], 0)
    assert all(torch.isfinite(p.grad).all() for p in engine.model.parameters)
