"""The token budget of a pass: how many tokens go through the model at once.

The budget halves when a pass of several sequences runs out of memory, and stays so until the trainer starts again. A
sequence that runs out of memory in a pass of its own does not halve it; `trainer.engine.fitting` drops the sequence
when that happens twice. Then the budget is again what it was before that batch, because the sequence may have caused
the batch's halvings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class PassTooLargeError(RuntimeError):
    """A forward or backward pass ran out of memory."""

    def __init__(self, indices: Sequence[int], tokens: int, why: str) -> None:
        super().__init__(indices, tokens, why)  # all arguments, so that the error can be pickled
        self.indices, self.tokens, self.why = tuple(indices), tokens, why
        """Indices of the pass's sequences in the batch; tokens of the pass, padding included; the original error."""

    def __str__(self) -> str:
        return f"out of memory in a pass of {len(self.indices)} sequence(s) and {self.tokens} tokens: {self.why}"

    @property
    def only_index(self) -> int | None:
        """Set if the pass held one sequence: its index in the examples that the passes are made of."""
        return self.indices[0] if len(self.indices) == 1 else None


_OUT_OF_MEMORY = ("DefaultCPUAllocator", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
"""In the messages of errors that have no class of their own: of host memory, of the driver, and of CUDA's libraries,
such as `CUBLAS_STATUS_ALLOC_FAILED`."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch ran out of device memory or of host memory."""
    return isinstance(error, torch.OutOfMemoryError | PassTooLargeError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
    )


class Budget:
    """The token budget of a pass over one engine's model. `limit` is `trainer.memory.tokens_per_batch`."""

    def __init__(self, limit: int, save_memory: Callable[[], bool] = lambda: False) -> None:
        """`save_memory` is tried before the budget is halved: it makes passes smaller some other way, and returns
        whether it could."""
        self._limit, self.save_memory = limit, save_memory
        self.tokens = limit
        """The current budget."""

    def set_limit(self, limit: int) -> None:
        """Set the configured limit. A budget that was reduced because memory ran out is not raised."""
        self.tokens = limit if self.tokens == self._limit else min(self.tokens, limit)
        self._limit = limit

    def halve(self, tried: int) -> None:
        """Halve the budget after a pass of `tried` tokens ran out of memory; it becomes at most half of `tried`."""
        self.tokens = max(1, min(self.tokens, tried) // 2)

    def restore(self, tokens: int) -> None:
        """Set the budget back to `tokens`, what it was before a batch of which a sequence was dropped."""
        self.tokens = min(tokens, self._limit)
