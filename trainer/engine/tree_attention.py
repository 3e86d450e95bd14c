"""Attention over rows that share prefixes, computed by segments of the prefix tree.

Under a dense mask, attention over a row of L tokens computes L x L pairs of query and key, and where many replies share
a prompt most of them are masked. A segment needs the keys of the earlier segments that it sees only: for 8 replies of
200 tokens to a prompt of 2,000 these are 0.58 of the pairs, and the prompt needs no mask.

All attention layers of transformers that compute by PyTorch's scaled dot products call one function. When a model
is loaded for training, `use_tree_attention` replaces it by one that looks whether the mask has a plan of
segments; calls without one go on as they were.

Shape letters as in `trainer.batches.packing`, and H heads, D dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.batches.packing import FULL, AttentionSpan, Layout, attended_pairs, segments

_SDPA = ALL_ATTENTION_FUNCTIONS["sdpa"]
_PAIRS_A_CALL = 2**15
"""Pairs of query and key that one more call of the attention function has to save, since a call has costs of its
own."""
_SHORT = 256
"""Keys up to which attention in bfloat16 is computed in float32 on a CPU: PyTorch's kernel for bfloat16 takes 36 ms
forward and backward over 8 rows of 122 tokens with 9 heads, that for float32 20 ms; from 1,500 on it is faster."""


@dataclass(frozen=True, eq=False)
class Segment:
    """What a segment of a row (`packing.segments`: adjacent columns that see the same columns before them) attends
    to."""

    seen: Sequence[tuple[int, int]]
    """The segments that it sees, as index and number of first columns that are seen: earlier ones, then itself."""
    mask: torch.Tensor | None
    """[1, 1, queries, columns of `seen`], or that of `lower_right_mask`. `None`: it sees no earlier segment, and itself
    causally."""


def mask_with_plan(layout: Layout, span: AttentionSpan) -> torch.Tensor:
    """Return the mask of a layout that has `ends_RL`. Where segments save time, its attribute `plan` holds those of its
    rows for `tree_attention`, and its values mean nothing: no mask of L x L is made."""
    assert layout.ends_RL is not None
    ends_RL = layout.ends_RL.tolist()
    calls = sum(len(segments(ends)) for ends in ends_RL)
    dense_pairs = layout.ends_RL.numel() * layout.ends_RL.shape[1]
    if dense_pairs - sum(map(attended_pairs, ends_RL)) <= calls * _PAIRS_A_CALL:
        mask: Any = layout.dense_mask(span)
    else:
        rows, length = layout.ends_RL.shape
        mask = torch.ones(1, dtype=torch.bool, device=layout.ends_RL.device).expand(rows, 1, length, length)
        mask.plan = [_plan_row(layout, row, ends, span) for row, ends in enumerate(ends_RL)]
    planned_mask: torch.Tensor = mask
    return planned_mask


def _plan_row(layout: Layout, row: int, ends: Sequence[int], span: AttentionSpan) -> list[Segment]:
    """Return the plan of a row: for each of its segments the earlier ones that it sees, and its mask if it needs one.

    `ends[k]`: the column from which column k is seen no more. A segment in which a key is hidden from later columns, as
    in padding, needs a mask, as do windows and chunks."""
    plan = []
    pieces = segments(ends)
    device = layout.ids_RL.device
    for start, stop, indices in pieces:
        mask: torch.Tensor | None = None
        # The columns of a segment follow each other, so those that a branch shares are its first ones.
        seen = [(j, sum(end > start for end in ends[slice(*pieces[j][:2])])) for j in indices[:-1]]
        seen.append((indices[-1], stop - start))
        if span != FULL or min(ends[start:stop]) < stop:
            columns = torch.cat([torch.arange(pieces[j][0], pieces[j][0] + count, device=device) for j, count in seen])
            mask = layout.seen(row, torch.arange(start, stop, device=device), columns, span)[None, None]
        elif len(seen) > 1:
            mask = lower_right_mask(stop - start, sum(count for _, count in seen), device)
        plan.append(Segment(seen, mask))
    return plan


def lower_right_mask(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Return the causal mask of the last `queries` of `keys` columns: on a GPU as PyTorch's bias, the only mask that
    its fused kernels take."""
    if device.type == "cpu":
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]
    bias: torch.Tensor = causal_lower_right(queries, keys)
    return bias


def tree_attention(
    module: Any,
    query_RHLD: torch.Tensor,
    key_RHLD: torch.Tensor,
    value_RHLD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return what transformers' attention by scaled dot products returns, [R, L, H, D], and `None` in place of the
    attention weights. It takes the place of that function, for calls with any mask."""
    plan: list[list[Segment]] | None = getattr(attention_mask, "plan", None)
    if plan is None:
        return _attended(module, query_RHLD, key_RHLD, value_RHLD, attention_mask, **options), None
    rows = []
    parts = (part.split(1) for part in (query_RHLD, key_RHLD, value_RHLD))
    for row, *qkv in zip(plan, *parts, strict=True):
        lengths = [segment.seen[-1][1] for segment in row]  # the last one seen is the segment itself
        queries, keys, values = (part.split(lengths, dim=2) for part in qkv)
        outputs = [
            _attended(
                module,
                query,
                torch.cat([keys[j][:, :, :count] for j, count in segment.seen], dim=2),
                torch.cat([values[j][:, :, :count] for j, count in segment.seen], dim=2),
                segment.mask,
                **options,
            )
            for query, segment in zip(queries, row, strict=True)
        ]
        rows.append(torch.cat(outputs, dim=1))
    return torch.cat(rows), None


def _attended(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> torch.Tensor:
    """Return the attention of queries to keys of shape [R, H, L, D], as [R, L, H, D]. On a CPU, bfloat16 is computed in
    float32 for at most `_SHORT` keys, because that takes less time."""
    if query.device.type == "cpu" and query.dtype == torch.bfloat16 and key.shape[2] <= _SHORT:
        in_float32: torch.Tensor = _SDPA(module, query.float(), key.float(), value.float(), mask, **options)[0]
        return in_float32.to(query.dtype)
    attended: torch.Tensor = _SDPA(module, query, key, value, mask, **options)[0]
    return attended


def use_tree_attention() -> None:
    """Let the models of this process attend by `tree_attention` where they compute by scaled dot products. May be
    called again."""
    ALL_ATTENTION_FUNCTIONS.register("sdpa", tree_attention)
