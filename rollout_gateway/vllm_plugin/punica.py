"""vLLM's interface of LoRA arithmetic (`PunicaWrapperCPU`) over `rollout_gateway.vllm_plugin.grouped`.

Results are those of vLLM's class up to rounding, with one difference: a row without adapter stays as it is. vLLM's
class reads its slot -1 as the last slot, so that such a row gets the adapter in that slot, if there is one.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from rollout_gateway.vllm_plugin import grouped


class GroupedPunicaWrapper(PunicaWrapperCPU):  # type: ignore[misc]
    """Groups the rows of a batch by adapter once, for all layers of the model.

    A layer with another number of rows than the batch is left to vLLM's class, and so are embeddings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._token_groups: grouped.Groups = ()
        """Of all tokens of the batch, for the model's linear layers."""
        self._sample_groups: grouped.Groups = ()
        """Of the tokens after which one is sampled, for the logits."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Note which rows of the next batch belong to which adapter. vLLM calls it before each batch."""
        super().update_metadata(*args, **kwargs)
        self._token_groups = grouped.group_rows(self.token_lora_indices)
        self._sample_groups = grouped.group_rows(self.sampler_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the adapters' part to the output `y` of a linear layer, whose columns are several parts
        (`output_slices`), such as queries, keys and values. vLLM gives `buffer` and further arguments in cases that its
        own class handles."""
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        if buffer is not None or kwargs or x.shape[0] != self.indices_len[0]:
            super().add_lora_linear(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, buffer=buffer, **kwargs)
            return
        grouped.add_linear(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, self._token_groups)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the adapters' part to the logits `y`. Where vLLM pads the vocabulary, `y` has fewer columns than the
        matrices."""
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        if buffer is not None or x.shape[0] != self.indices_len[1]:
            super().add_lora_logits(y, x, lora_a_stacked, lora_b_stacked, scale, buffer=buffer, **kwargs)
            return
        width = min(y.shape[1], lora_b_stacked.shape[-2])
        a, b = (lora_a_stacked,), (lora_b_stacked[..., :width, :],)
        grouped.add_linear(y, x, a, b, scale, (width,), self._sample_groups)
