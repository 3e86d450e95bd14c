"""Attention by segments of the prefix tree gives what a dense mask gives, with its gradients."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

from trainer.batches.packing import FULL, AttentionSpan, Layout, prefix_shared, segments
from trainer.engine import tree_attention
from trainer.engine.tree_attention import mask_with_plan
from trainer.sequences import TokenSequence

GQA = SimpleNamespace(num_key_value_groups=2, is_causal=True)


def group(prompt: int, replies: int, length: int, seed: int = 0) -> list[TokenSequence]:
    """Replies that share a prompt, and every second of them the first half of its own tokens too."""
    rng = np.random.default_rng(seed)
    shared, half = rng.integers(2, 90, prompt), rng.integers(2, 90, length // 2)
    out = []
    for i in range(replies):
        own = rng.integers(2, 90, length - len(half) * (i % 2))
        ids = np.concatenate([shared, *([half] if i % 2 else []), own])
        out.append(TokenSequence.made_up("t", ids, length))
    return out


def layout_of(*sizes: tuple[int, int, int]) -> Layout:
    groups = [group(*size, seed=i) for i, size in enumerate(sizes)]
    return prefix_shared([s for g in groups for s in g], [i for i, g in enumerate(groups) for _ in g])


def attended(layout: Layout, mask: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of queries, keys and values."""
    torch.manual_seed(0)
    shape = layout.ids_RL.shape
    parts = [torch.randn(shape[0], heads, shape[1], 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    output, none = tree_attention.tree_attention(GQA, *parts, mask, scaling=0.3)
    assert none is None
    (output * weights).sum().backward()
    return [output.detach(), *(part.grad for part in parts)]


@pytest.mark.parametrize("lower_right_mask", ["mask", "bias"])
@pytest.mark.parametrize("span", [FULL, AttentionSpan(window=5), AttentionSpan(chunk=7)], ids=str)
def test_segments_give_what_the_dense_mask_gives(
    span: AttentionSpan, lower_right_mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the bias that a GPU gets."""
    if lower_right_mask == "bias":
        monkeypatch.setattr(
            tree_attention, "lower_right_mask", lambda queries, keys, _: causal_lower_right(queries, keys)
        )
    layout = layout_of((12, 4, 6), (1, 3, 3), (20, 1, 4), (9, 6, 1))
    dense = layout.dense_mask(span)
    assert dense is not None
    assert layout.ends_RL is not None
    weights = torch.randn(*layout.ids_RL.shape, 4, 8, dtype=torch.float64)
    expected = attended(layout, dense, weights)
    monkeypatch.setattr(tree_attention, "_PAIRS_A_CALL", -(2**30))
    mask = mask_with_plan(layout, span)
    assert hasattr(mask, "plan")
    for mine, theirs in zip(attended(layout, mask, weights), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_plan_is_made_where_it_saves_pairs() -> None:
    for size, saves in (((2000, 8, 200), True), ((60, 8, 20), False)):
        layout = layout_of(size)
        plan = getattr(mask_with_plan(layout, FULL), "plan", None)
        assert (plan is not None) == saves
        if plan is not None:
            (row,) = plan
            assert sum(segment.seen[-1][1] for segment in row) == layout.ids_RL.shape[1]
            assert row[0].mask is None  # the prompt
            assert sum(segment.mask is None for segment in row) == 1


def test_padding_is_one_segment() -> None:
    layout = layout_of((12, 2, 4), (100, 2, 40))
    assert layout.ends_RL is not None
    short = segments(layout.ends_RL[0].tolist())
    assert len(short) <= 5
    assert short[-1][1] == layout.ids_RL.shape[1]


def test_an_import_changes_no_attention_of_the_process() -> None:
    """Only a model that is trained does."""
    code = (
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions\n"
        "before = functions['sdpa']\n"
        "import trainer.engine.tree_attention\n"
        "assert functions['sdpa'] is before\n"
        "trainer.engine.tree_attention.use_tree_attention()\n"
        "assert functions['sdpa'] is trainer.engine.tree_attention.tree_attention\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
