"""Attention over a prefix tree: a dense mask for SDPA, or a block mask for FlexAttention.

FlexAttention evaluates a rule (`Layout.ends_RL`) instead of a dense mask and skips blocks in which no query sees a
key, so memory does not grow with the square of a tree. It is registered with transformers as an attention
implementation that uses SDPA if it gets no block mask, as for padded rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pipeline.config import ConfigError, TrainerConfig
from trainer.batches.packing import FULL, Layout, Reach

FLEX = "journeyman_flex"
"""The name under which transformers finds `_attend`."""

_compiled: Any = None


def _flex(device: torch.device) -> Any:
    """FlexAttention, compiled on a GPU. On CPU the plain version, which has no gradients and is for comparing
    results."""
    global _compiled
    if device.type == "cpu":
        return flex_attention
    if _compiled is None:
        _compiled = torch.compile(flex_attention, dynamic=True)
    return _compiled


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None,
    scaling: float | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    if not isinstance(attention_mask, BlockMask):
        out: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **other
        )
        return out
    grouped = query.shape[1] != key.shape[1]
    attended = _flex(query.device)(
        query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=grouped
    )
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(FLEX, _attend)
AttentionMaskInterface.register(FLEX, sdpa_mask)


def implementation(config: TrainerConfig, device: torch.device) -> str | None:
    """The attention implementation to load the model with; `None` leaves the choice to transformers. Raises
    `ConfigError` if it does not work on the device."""
    if config.memory.attention == "sdpa":
        return None
    if config.engine != "transformers":
        raise ConfigError("trainer.memory.attention: flex works with engine `transformers` only")
    if device.type == "cpu":
        raise ConfigError("trainer.memory.attention: FlexAttention has no gradients on CPU; use `sdpa`")
    return FLEX


def mask_of(layout: Layout, flex: bool, reach: Reach = FULL) -> torch.Tensor | BlockMask | None:
    """The attention mask for layers that see as far as `reach`. `None` means causal attention."""
    if layout.ends_RL is None or layout.positions_RL is None or not flex:
        return layout.dense_mask(reach)
    ends_RL, at_RL = layout.ends_RL, layout.positions_RL
    rows, length = ends_RL.shape

    def sees(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = (key <= query) & (query < ends_RL[row, key])
        if reach.window:
            seen = seen & (at_RL[row, query] - at_RL[row, key] < reach.window)
        if reach.chunk:
            seen = seen & (at_RL[row, query] // reach.chunk == at_RL[row, key] // reach.chunk)
        return seen

    return create_block_mask(
        sees, rows, None, length, length, device=str(ends_RL.device), _compile=ends_RL.device.type != "cpu"
    )
