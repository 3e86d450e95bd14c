"""LoRA for a batch whose rows (tokens) belong to different adapters: one pair of matrix products per adapter, where
vLLM's kernels for CPU copy the adapter's matrices for each row. A slot is a place for an adapter in the server's
stacked matrices. `rollout_gateway.vllm_plugin.punica` calls this for each layer.

Shape letters: N rows of the batch, G rows of one adapter, I inputs, O outputs of a layer, R rank, L adapter slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

NO_ADAPTER = -1
"""The slot of rows that belong to no adapter."""

Rows: TypeAlias = slice | torch.Tensor | None
"""Rows of a batch: all (`None`), neighbours (a slice), or their numbers in ascending order."""
Groups: TypeAlias = tuple[tuple[int, Rows], ...]
"""The slots of the adapters in a batch, each with its rows."""


def group_rows(slots_N: torch.Tensor) -> Groups:
    """Return each adapter slot in `slots_N` with its rows. Rows of `NO_ADAPTER` are in no group."""
    slots = torch.unique(slots_N).tolist()
    if len(slots) == 1:
        return () if slots[0] == NO_ADAPTER else ((slots[0], None),)
    groups: list[tuple[int, Rows]] = []
    for slot in slots:
        if slot == NO_ADAPTER:
            continue
        rows_G = (slots_N == slot).nonzero().squeeze(1)
        first, last = int(rows_G[0]), int(rows_G[-1])
        neighbours = last - first + 1 == len(rows_G)
        groups.append((slot, slice(first, last + 1) if neighbours else rows_G))
    return tuple(groups)


def _matrix(stacked: torch.Tensor, slot: int) -> torch.Tensor:
    """Return the matrix of one slot of [L, rows, columns] or [L, 1, rows, columns]."""
    weights = stacked[slot]
    return weights.squeeze(0) if weights.ndim == 3 else weights


def add_linear(
    y_NO: torch.Tensor,
    x_NI: torch.Tensor,
    a_stacked: Sequence[torch.Tensor],
    b_stacked: Sequence[torch.Tensor],
    scale: float,
    widths: Sequence[int],
    groups: Groups,
) -> None:
    """Add `scale` · x · Aᵀ · Bᵀ to `y_NO`, whose columns are parts of `widths` columns, each with matrices of its own.

    The first product is computed in float32 and the second in the precision of `y_NO`, as vLLM does."""
    for slot, rows in groups:
        x = (x_NI if rows is None else x_NI[rows]).float()
        offset = 0
        for a, b, width in zip(a_stacked, b_stacked, widths, strict=True):
            low = torch.mm(x, _matrix(a, slot).float().t())
            if scale != 1.0:
                low *= scale
            part = y_NO[:, offset : offset + width]
            low, b_RO = low.to(y_NO.dtype), _matrix(b, slot).to(y_NO.dtype).t()
            if isinstance(rows, torch.Tensor):
                part.index_add_(0, rows, torch.mm(low, b_RO))
            else:
                (part if rows is None else part[rows]).addmm_(low, b_RO)
            offset += width
