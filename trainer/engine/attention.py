"""Attention masks of prefix trees: dense for SDPA, block masks for FlexAttention.

FlexAttention evaluates a mask function (over `Layout.ends_RL`) instead of a dense mask and skips blocks in which no
query sees a key, so memory does not grow with the square of the tree. It is registered with transformers as a custom
attention function, which falls back to SDPA when it gets no block mask, as for padded rows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pipeline.config import ConfigError, TrainerConfig
from trainer.batches.packing import FULL, AttentionSpan, Layout

FLEX = "journeywork_flex"
"""The name under which `_attend` is registered with transformers."""


@functools.cache
def _flex(device_type: str) -> Any:
    """Return FlexAttention, compiled on a GPU. On CPU it is not compiled and has no gradients (for tests only)."""
    return flex_attention if device_type == "cpu" else torch.compile(flex_attention, dynamic=True)


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
    attended = _flex(query.device.type)(
        query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=grouped
    )
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(FLEX, _attend)
AttentionMaskInterface.register(FLEX, sdpa_mask)


def attention_implementation(config: TrainerConfig, device: torch.device) -> str | None:
    """Return the attention implementation to load the model with. `None` lets transformers choose.

    Raises `ConfigError` if the engine or the device can't train with the one that is set."""
    if config.memory.attention == "sdpa":
        return None
    if config.engine != "transformers":
        raise ConfigError(
            "trainer.memory.attention: `flex` works with trainer.engine `transformers` only; use `sdpa`"
        )
    if device.type == "cpu":
        raise ConfigError("trainer.memory.attention: FlexAttention has no gradients on CPU; use `sdpa`")
    return FLEX


def make_attention_mask(
    layout: Layout, flex: bool, span: AttentionSpan = FULL
) -> torch.Tensor | BlockMask | None:
    """Return the attention mask for layers with this `span`: a block mask if `flex`, else a dense one.

    `None` stands for the plain causal mask."""
    if layout.ends_RL is None or layout.positions_RL is None or not flex:
        return layout.dense_mask(span)
    ends_RL, positions_RL = layout.ends_RL, layout.positions_RL
    rows, length = ends_RL.shape

    def sees(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = (key <= query) & (query < ends_RL[row, key])
        if span.window:
            seen = seen & (positions_RL[row, query] - positions_RL[row, key] < span.window)
        if span.chunk:
            seen = seen & (positions_RL[row, query] // span.chunk == positions_RL[row, key] // span.chunk)
        return seen

    return create_block_mask(
        sees, rows, None, length, length, device=str(ends_RL.device), _compile=ends_RL.device.type != "cpu"
    )
