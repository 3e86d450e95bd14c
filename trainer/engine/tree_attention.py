"""Attention over rows that share prefixes, computed by segments of the prefix tree.

Under a dense mask, attention over a row of L tokens computes L x L pairs of query and key, and where many replies share
a prompt most of them are masked. A segment needs the keys of the earlier segments that it sees only: for 8 replies of
200 tokens to a prompt of 2,000 these are 0.58 of the pairs, and the prompt needs no mask.

All attention layers of transformers that compute by PyTorch's scaled dot products call one function. When a model
is loaded for training, `trainer.engine.context_parallel` replaces it by one that looks whether the mask has a plan of
segments; calls without one go on as they were.

Shape letters as in `trainer.batches.packing`, and H heads, D dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.batches.packing import pairs, segments

_SDPA = ALL_ATTENTION_FUNCTIONS["sdpa"]
_PAIRS_A_CALL = 2**15
"""So many pairs must a call for one more segment save: a call has costs of its own."""


@dataclass(frozen=True, eq=False)
class Segment:
    """A segment as `packing.segments` finds it."""

    seen: Sequence[int]
    """The earlier segments that it sees, then its own place."""
    mask: torch.Tensor | None
    """[1, 1, queries, keys of the segments in `seen`]. `None`: it sees no earlier one, and itself causally."""


@dataclass(frozen=True, eq=False)
class Row:
    lengths: list[int]
    """Of the row's segments, which are all of its columns."""
    segments: list[Segment]


def planned(mask_R1LL: torch.Tensor, ends_RL: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return the mask of a layout, with a plan of its rows as its attribute `plan` if segments save time.

    `ends_RL` is the layout's. `causal`: nothing is hidden but what `ends_RL` hides, for example by a sliding window."""
    plan = [_plan_row(mask[0], ends, causal) for mask, ends in zip(mask_R1LL, ends_RL.tolist(), strict=True)]
    calls = sum(len(row.segments) for row in plan)
    if mask_R1LL.numel() - sum(map(pairs, ends_RL.tolist())) > calls * _PAIRS_A_CALL:
        mask_R1LL.plan = plan
    return mask_R1LL


def _plan_row(mask_LL: torch.Tensor, ends: Sequence[int], causal: bool) -> Row:
    """Return which earlier segments each segment of a row sees, and its mask if it needs one.

    `ends[k]`: the column from which column k is seen no more. A key that is hidden within its own segment, as padding
    is, needs a mask."""
    found = []
    pieces = segments(ends)
    for start, stop, seen in pieces:
        mask = None
        if len(seen) > 1 or not causal or min(ends[start:stop]) < stop:
            columns = [mask_LL[start:stop, slice(*pieces[j][:2])] for j in seen]
            mask = torch.cat(columns, dim=1)[None, None]
        found.append(Segment(seen, mask))
    return Row([stop - start for start, stop, _ in pieces], found)


def tree_attention(
    module: Any,
    query_RHLD: torch.Tensor,
    key_RHLD: torch.Tensor,
    value_RHLD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return what transformers' attention by scaled dot products returns, [R, L, H, D], and `None`."""
    plan: list[Row] | None = getattr(attention_mask, "plan", None)
    if plan is None:
        attended: tuple[torch.Tensor, None] = _SDPA(module, query_RHLD, key_RHLD, value_RHLD, attention_mask, **options)
        return attended
    rows = []
    parts = (part.split(1) for part in (query_RHLD, key_RHLD, value_RHLD))
    for row, *qkv in zip(plan, *parts, strict=True):
        queries, keys, values = (part.split(row.lengths, dim=2) for part in qkv)
        outputs = [
            _SDPA(
                module,
                query,
                torch.cat([keys[j] for j in segment.seen], dim=2),
                torch.cat([values[j] for j in segment.seen], dim=2),
                segment.mask,
                **options,
            )[0]
            for query, segment in zip(queries, row.segments, strict=True)
        ]
        rows.append(torch.cat(outputs, dim=1))
    return torch.cat(rows), None
