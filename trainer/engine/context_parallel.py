"""Rows divided among the trainer's processes, for sequences whose activations one of them does not hold
(`trainer.memory.context_parallel`).

The processes of a context group make the same passes. Each holds an equal part of the columns of every row and computes
all but attention for these alone. For attention they exchange all heads of a part of the columns for all columns of a
part of the heads, and exchange back after it ("DeepSpeed Ulysses", Jacobs et al., 2023). So attention sees whole rows,
with the masks and the segments that it has in one process. Layers that mix positions by anything else are refused.

Logprobs of trained tokens are gathered, so every process computes the loss of the whole pass. Its gradient flows into
its own columns, and by the exchange into those that they attend to: the sum over the processes is the gradient.

Shape letters as in `trainer.batches.packing`, and n processes of a group, C = L / n columns of a part, H heads, h = H /
n heads of a process, D dimensions of a head.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pipeline.config import ConfigError
from trainer.batches.packing import Layout
from trainer.engine.parallel import ProcessGroup
from trainer.engine.tree_attention import tree_attention


class ContextGroup:
    """The processes that this one shares its rows with. Every process makes one at the same time.

    `decoder` is the model's text decoder. `masked`: its layers need masks where rows share no prefixes. Raises
    `ConfigError` if the processes or the model's heads can't be divided by `size`."""

    def __init__(self, size: int, process_group: ProcessGroup, decoder: Any, *, masked: bool) -> None:
        _check(size, process_group.size, decoder.config)
        self.size, self._index, self._masked = size, process_group.rank % size, masked
        self._group, _ = dist.new_subgroups(size)
        for module in decoder.modules():
            module.context_group = self

    def whole(self, layout: Layout) -> Layout:
        """The layout with its positions, its masks if there are any, and as many columns for each process."""
        (rows, length), device = layout.ids_RL.shape, layout.ids_RL.device
        columns = torch.arange(-(-length // self.size) * self.size, device=device).expand(rows, -1)
        positions, ends, more = layout.positions_RL, layout.ends_RL, columns[:, length:]
        if ends is None and self._masked:
            ends = torch.full_like(layout.ids_RL, length)
        return replace(
            layout,
            ids_RL=torch.cat([layout.ids_RL, torch.zeros_like(more)], 1),
            # A tree may have more columns than the model has positions.
            positions_RL=columns if positions is None else torch.cat([positions, torch.zeros_like(more)], 1),
            # Padding sees itself, as in `prefix_shared`.
            ends_RL=None if ends is None else torch.cat([ends, more + 1], 1),
            experts_RLMk=None
            if (experts := layout.experts_RLMk) is None
            else torch.cat([experts, experts.new_full((rows, more.shape[1], *experts.shape[2:]), -1)], 1),
        )

    def part(self, whole: Layout) -> Layout:
        """This process's columns of `whole`, and the trained tokens that they predict. The masks stay whole."""
        width = whole.ids_RL.shape[1] // self.size
        columns = slice(self._index * width, (self._index + 1) * width)
        assert whole.positions_RL is not None
        (own_n,) = (whole.cols_N // width == self._index).nonzero(as_tuple=True)
        trained = {
            name: getattr(whole, name)[own_n]
            for name in ("rows_N", "targets_N", "temperatures_N", "sequence_N", "slot_N")
        }
        return replace(
            whole,
            **trained,
            ids_RL=whole.ids_RL[:, columns],
            positions_RL=whole.positions_RL[:, columns],
            cols_N=whole.cols_N[own_n] - columns.start,
            cuts_N3=None if whole.cuts_N3 is None else whole.cuts_N3[own_n],
            experts_RLMk=None if whole.experts_RLMk is None else whole.experts_RLMk[:, columns],
        )

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of the processes' values, without a gradient."""
        values = values.detach().clone()
        dist.all_reduce(values, group=self._group)
        return values

    def heads(self, *parts_RHCD: torch.Tensor) -> list[torch.Tensor]:
        """All columns of this process's heads, [R, h, L, D], from all heads of its columns, for each of the tensors."""
        sent = [part.unflatten(1, (self.size, -1)).movedim(1, 0) for part in parts_RHCD]
        received = self._exchange(torch.cat([part_nRhCD.flatten(1) for part_nRhCD in sent], 1))
        pieces = received.split([part_nRhCD[0].numel() for part_nRhCD in sent], 1)
        return [
            piece.view(part_nRhCD.shape).movedim(0, 2).flatten(2, 3)
            for piece, part_nRhCD in zip(pieces, sent, strict=True)
        ]

    def columns(self, attended_RLhD: torch.Tensor) -> torch.Tensor:
        """All heads of this process's columns, [R, C, H, D], from all columns of its heads."""
        received_nRChD = self._exchange(attended_RLhD.unflatten(1, (self.size, -1)).movedim(1, 0))
        return received_nRChD.movedim(0, 2).flatten(2, 3)

    def _exchange(self, sent: torch.Tensor) -> torch.Tensor:
        received: torch.Tensor = _Exchange.apply(sent, self._group)
        return received


class _Exchange(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    """Sends the i-th of n equal parts to the i-th process. The gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        received = torch.empty(sent.shape, dtype=sent.dtype, device=sent.device)
        dist.all_to_all_single(received, sent.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Exchange.apply(gradients[0], ctx.group), None


def _check(size: int, processes: int, config: Any) -> None:
    setting = f"trainer.memory.context_parallel is {size}"
    if processes % size:
        raise ConfigError(f"{setting}: it has to divide the number of the trainer's processes, which is {processes}")
    heads = math.gcd(*(layer.num_attention_heads for layer in config.per_layer_config))
    if heads % size:
        possible = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"{setting}: each process takes an equal part of the model's {heads} attention heads, so it has to be one "
            f"of {', '.join(map(str, possible))}"
        )
    if config._attn_implementation != "sdpa":
        raise ConfigError(
            f"{setting}: rows are divided under SDPA attention only, and the model's is "
            f"`{config._attn_implementation}`; set it to 1"
        )


def context_attention(
    module: Any,
    query_RHCD: torch.Tensor,
    key_RKCD: torch.Tensor,
    value_RKCD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return what `tree_attention` returns. K: key heads, of which each stands for as many query heads."""
    group: ContextGroup | None = getattr(module, "context_group", None)
    if group is None:
        return tree_attention(module, query_RHCD, key_RKCD, value_RKCD, attention_mask, **options)
    length = group.size * query_RHCD.shape[2]
    if attention_mask is not None and attention_mask.shape[-2:] != (length, length):
        raise ConfigError(
            "trainer.memory.context_parallel: the model makes attention masks of its own for a part of a row; set it "
            "to 1"
        )
    # A process needs a whole number of key heads. Those that several need are sent to each.
    repeats = group.size // math.gcd(group.size, key_RKCD.shape[1])
    keys_and_values = (part.repeat_interleave(repeats, 1) for part in (key_RKCD, value_RKCD))
    query, key, value = group.heads(query_RHCD, *keys_and_values)
    divided = SimpleNamespace(
        is_causal=getattr(module, "is_causal", True), num_key_value_groups=query.shape[1] // key.shape[1]
    )
    attended_RLhD, _ = tree_attention(divided, query, key, value, attention_mask, **options)
    return group.columns(attended_RLhD), None


def use_own_attention() -> None:
    """Let the models of this process attend by `context_attention` where they compute by scaled dot products. Calls
    without a plan of segments and without divided rows go on as they were. May be called again."""
    ALL_ATTENTION_FUNCTIONS.register("sdpa", context_attention)
