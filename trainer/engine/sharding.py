"""A base model's weights divided among the trainer's processes, by FSDP2 (`trainer.memory.sharded`).

Each process holds its share of every weight. A layer is put together when a pass reaches it, and again in the backward
pass. The adapters are whole in every process: they are small, and the optimizer of rank 0 needs them. Every process
must make the same number of passes, because all of them take part in putting a layer together.

Trunk and head are wrapped apart, because they are called apart (`trainer.engine.forward`). The head is called as often
as a pass has chunks of logits, which differs between processes. So its weight is put together once for a pass, for the
whole pass. Where the input embeddings are the same weight, they use it meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trainer.engine.parallel import ProcessGroup


class ShardedModel:
    """A causal language model whose frozen weights are divided. `model` is the one inside PEFT's wrapper, on the CPU,
    and `trunk` its part without the head; both are changed in place."""

    def __init__(self, model: Any, trunk: Any, device: torch.device, process_group: ProcessGroup) -> None:
        mesh = init_device_mesh(device.type, (process_group.size,))
        adapters = {p for p in model.parameters() if p.requires_grad}
        for parameter in adapters:
            parameter.data = parameter.data.to(device)
        self._head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        self._tied = embeddings if embeddings.weight is self._head.weight else None
        # Not after a forward or a backward pass over some logits, but at the end of `whole_head`.
        fully_shard(self._head, mesh=mesh, reshard_after_forward=False)
        self._head.set_reshard_after_backward(False)
        if self._tied is not None:
            self._tied.register_parameter("weight", None)
        # A vision tower is put together with the trunk: not every pass has images.
        decoder = trunk if model.get_decoder() is model else model.get_decoder()
        layers = [m for m in decoder.modules() if type(m).__name__ in set(model._no_split_modules or ())]
        for module in (*layers, trunk):
            fully_shard(module, mesh=mesh, ignored_params=adapters, reshard_after_forward=True)

    @contextmanager
    def whole_head(self) -> Iterator[None]:
        """Hold the head's weight whole within the block, which is one pass."""
        self._head.unshard()
        if self._tied is not None:
            self._tied.register_parameter("weight", self._head.weight)
        try:
            yield
        finally:
            if self._tied is not None:
                self._tied.register_parameter("weight", None)
            self._head.reshard()
