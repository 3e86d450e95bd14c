"""Router replay: tokens go to the experts that the sampler chose, in every layout, and in passes made again."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pipeline.config import ConfigError, TrainerConfig
from tests.kits.settings import with_values
from tests.trainer.engine.test_families import conversations
from tests.trainer.families import make
from tests.trainer.kit import exactly, exchange, stir
from trainer.batches.packing import Cost, Layout, padded, prefix_shared, sharing_pays, used_ids
from trainer.engine.engine import Engine
from trainer.sequences import TokenSequence, build

FAMILIES = (
    "qwen3_moe",
    "mixtral",
    "qwen2_moe",
    "olmoe",
    "granitemoe",
    "gpt_oss",
    "minimax_m2",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
)

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

Experts = npt.NDArray[np.int16]


def engine_of(family: str, folder: Path, **settings: Any) -> Engine:
    config = with_values(TrainerConfig(), {"lora.rank": 4, "dtype": "float64", "router_replay": True, **settings})
    engine = exactly(Engine(make(family, folder), config))
    stir(engine)
    return engine


def routers(engine: Engine) -> dict[int, Any]:
    layers = engine.model.forward.model.get_decoder().layers
    return {
        i: next(m for m in layer.modules() if "Router" in type(m).__name__)
        for i, layer in enumerate(layers)
        if any("Router" in type(m).__name__ for m in layer.modules())
    }


@contextmanager
def recorded(engine: Engine) -> Iterator[dict[int, torch.Tensor]]:
    """The indices with which the experts of each layer are called."""
    seen: dict[int, torch.Tensor] = {}
    handles = []
    for i, router in routers(engine).items():

        def keep(_: Any, __: Any, out: Any, i: int = i) -> None:
            seen[i] = next(o for o in reversed(out) if not o.is_floating_point())

        handles.append(router.register_forward_hook(keep))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def own_choices(engine: Engine, s: TokenSequence) -> Experts:
    """The choices of the model for a sequence by itself, as vLLM would return them: not for the last token."""
    ids = torch.from_numpy(s.ids.astype(np.int64))[None, :-1]
    engine.model.forward.replay.set(None)
    with recorded(engine) as seen, torch.no_grad():
        engine.model.peft(input_ids=ids, use_cache=False)
    replay = engine.model.forward.replay
    out = np.zeros((len(s.ids) - 1, replay.layers, replay.k), np.int16)
    for i, chosen in seen.items():
        out[:, i] = chosen.numpy()
    return out


def with_experts(s: TokenSequence, experts: Experts) -> TokenSequence:
    last = np.full((1, *experts.shape[1:]), -1, np.int16)
    return replace(s, experts=np.concatenate([experts, last]))


def others(experts: Experts, count: int, seed: int) -> Experts:
    """Choices of other experts, at random."""
    rng = np.random.default_rng(seed)
    return rng.permuted(np.tile(np.arange(count), (*experts.shape[:2], 1)), axis=-1)[..., : experts.shape[2]].astype(
        np.int16
    )


def logprobs_and_gradients(engine: Engine, layout: Layout, shape: tuple[int, int]) -> tuple[torch.Tensor, Any]:
    engine.model.peft.zero_grad(set_to_none=True)
    out = engine.model.logprobs(layout, shape)[0]
    out.sum().backward()
    return out.detach(), [None if p.grad is None else p.grad.clone() for p in engine.model.parameters]


def assert_same(mine: tuple[torch.Tensor, Any], theirs: tuple[torch.Tensor, Any]) -> None:
    torch.testing.assert_close(mine[0], theirs[0], rtol=0, atol=1e-6)
    for a, b in zip(mine[1], theirs[1], strict=True):
        if a is not None or b is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("family", FAMILIES)
def test_own_choices_change_nothing_and_planted_ones_are_followed(family: str, tmp_path: Path) -> None:
    engine = engine_of(family, tmp_path)
    plain, groups = conversations()
    shape = (len(plain), max(s.trained_tokens for s in plain))
    own = [own_choices(engine, s) for s in plain]
    want = logprobs_and_gradients(engine, padded(plain), shape)
    replayed = [with_experts(s, e) for s, e in zip(plain, own, strict=True)]
    for layout in (padded(replayed), prefix_shared(replayed, groups)):
        assert_same(logprobs_and_gradients(engine, layout, shape), want)
    count = engine.model.forward.replay.experts
    planted = [with_experts(s, others(e, count, i)) for i, (s, e) in enumerate(zip(plain, own, strict=True))]
    layout = padded(planted)
    with recorded(engine) as seen:
        forced = logprobs_and_gradients(engine, layout, shape)
    assert not torch.allclose(forced[0], want[0], atol=1e-3)
    assert layout.experts_RLMk is not None
    for i, chosen in seen.items():
        expected = layout.experts_RLMk[:, :, i].reshape(-1, chosen.shape[-1])
        known = expected[:, 0] >= 0
        assert (chosen.reshape(expected.shape)[known] == expected[known]).all()
    assert_same(logprobs_and_gradients(engine, prefix_shared(planted, groups), shape), forced)


def test_planted_choices_give_the_logprobs_of_a_forward_pass_forced_by_hand(tmp_path: Path) -> None:
    """By hand: routers whose scores are masked but for the chosen experts choose no others."""
    engine = engine_of("mixtral", tmp_path)  # its weights are normalised over the chosen experts
    (s,) = conversations()[0][:1]
    replay = engine.model.forward.replay
    chosen = others(own_choices(engine, s), replay.experts, 3)
    got = engine.model.logprobs(padded([with_experts(s, chosen)]), (1, s.trained_tokens))[0]
    replay.set(None)

    def forced(layer: int, router: Any) -> Any:
        allowed = torch.zeros(len(chosen), replay.experts, dtype=torch.bool)
        allowed.scatter_(1, torch.from_numpy(chosen[:, layer].astype(np.int64)), True)

        def forward(hidden: torch.Tensor) -> Any:
            scores = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
            probabilities = scores.masked_fill(~allowed[: len(scores)], -torch.inf).float().softmax(-1)
            values, indices = probabilities.sort(-1, descending=True)
            return scores, values[:, : replay.k], indices[:, : replay.k]

        return forward

    for i, router in routers(engine).items():
        router.forward = forced(i, router)
    want = engine.model.logprobs(padded([s]), (1, s.trained_tokens))[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)  # the router's softmax is float32


def test_layers_that_the_backward_pass_computes_again_replay_the_same(tmp_path: Path) -> None:
    (s,) = conversations()[0][:1]
    results = []
    for checkpointing in ("off", "on"):
        engine = engine_of("qwen3_moe", tmp_path, **{"memory.gradient_checkpointing": checkpointing})
        planted = with_experts(s, others(own_choices(engine, s), engine.model.forward.replay.experts, 1))
        results.append(logprobs_and_gradients(engine, padded([planted]), (1, s.trained_tokens)))
    assert_same(results[1], results[0])


def test_tokens_share_a_prefix_only_where_their_experts_are_equal() -> None:
    (one, two), groups = conversations()[0][:2], [0, 0]
    experts = np.zeros((60, 1, 1), np.int16)
    equal = [replace(s, experts=experts[: len(s.ids)]) for s in (one, two)]
    assert prefix_shared(equal, groups).tokens == prefix_shared([one, two], groups).tokens
    changed = experts.copy()
    changed[10] = 1  # what follows is another branch
    other = [equal[0], replace(two, experts=changed[: len(two.ids)])]
    layout = prefix_shared(other, groups)
    assert layout.tokens == len(used_ids(one)) + len(used_ids(two)) - 10
    assert layout.experts_RLMk is not None
    assert int((layout.experts_RLMk == 1).sum()) == 1
    assert not sharing_pays(other, groups, Cost(1.0, 1.0))


def npy(experts: npt.NDArray[Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, experts)
    return out.getvalue()


def test_a_sequence_has_the_experts_of_the_calls_that_sampled_its_tokens() -> None:
    def of(tokens: int, expert: int) -> bytes:
        return npy(np.full((tokens, 2, 1), expert, np.uint8))

    calls = [
        exchange("t", 0, [5, 6], [7, 8], experts=of(3, 1)),
        exchange("t", 1, [5, 6, 7, 8, 9], [10, 11], experts=of(6, 2)),
        exchange("t", 2, [5, 6, 7, 8, 9, 10, 11, 12], [13]),  # streamed: the server returns none
    ]
    (sequence,) = build("t", calls, replay=True)
    assert sequence.experts is not None
    # Token 8 never went through the model in the first call.
    assert sequence.experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 2, -1, -1, -1]
    assert build("t", calls)[0].experts is None
    # A token of a streamed call has the choices of the first later call that has it in its prompt. vLLM's field may be
    # of uint8, uint16 or int32.
    calls[0] = exchange("t", 0, [5, 6], [7, 8])
    calls[1] = exchange("t", 1, [5, 6, 7, 8, 9], [10, 11], experts=npy(np.full((6, 2, 1), 2, np.int32)))
    (later,) = build("t", calls, replay=True)
    assert later.experts is not None
    assert later.experts[:, 0, 0].tolist() == [2] * 6 + [-1] * 3
    assert later.replayed_tokens == 4  # of 5: the token before the last one has no choices
    for odd in (b"", b"no array", npy(np.zeros((3, 2, 1))), npy(np.zeros((9, 2, 1), np.uint8))):
        assert build("t", [exchange("t", 0, [5, 6], [7, 8], experts=odd)], replay=True)[0].experts is None


def test_choices_of_another_model_are_named(tmp_path: Path) -> None:
    engine = engine_of("qwen3_moe", tmp_path)
    replay = engine.model.forward.replay
    assert replay.why_unfit(np.zeros((3, replay.layers, replay.k), np.int16)) == ""
    for odd in (np.zeros((3, 9, 2), np.int16), np.full((3, replay.layers, replay.k), replay.experts, np.int16)):
        assert "does the inference server serve another model" in replay.why_unfit(odd)
    with pytest.raises(ConfigError, match=r"trainer\.router_replay: .* has no routers"):
        engine_of("qwen3", tmp_path / "dense")
