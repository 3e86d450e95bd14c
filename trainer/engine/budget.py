"""The token budget of a pass: how many tokens go through the model at once.

The budget halves when a pass of several sequences runs out of memory. After `GOOD_STEPS` steps without running out it
doubles, up to `trainer.memory.tokens_per_batch`. If memory runs out again after the budget grew, twice as many such
steps are required before it grows the next time. A sequence that runs out of memory in a pass of its own does not
change the budget; `trainer.engine.fitting` drops it when that happens twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

GOOD_STEPS = 16
"""Number of steps without running out of memory after which the budget grows."""
_MAX_GOOD_STEPS = 1024


class PassTooLargeError(RuntimeError):
    """A forward or backward pass ran out of memory."""

    def __init__(self, indices: Sequence[int], tokens: int, why: str) -> None:
        super().__init__(indices, tokens, why)  # all arguments, so that the error can be pickled
        self.indices, self.tokens, self.why = tuple(indices), tokens, why
        """Indices of the pass's sequences in the batch; tokens of the pass, padding included; the original error."""

    def __str__(self) -> str:
        return (
            f"out of memory in a pass of {len(self.indices)} sequence(s) and {self.tokens} tokens: {self.why}"
        )

    @property
    def only_index(self) -> int | None:
        """Set if the pass held one sequence: its index in the examples that the passes are made of."""
        return self.indices[0] if len(self.indices) == 1 else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch ran out of device memory, or of host memory, for which it has no exception class."""
    return isinstance(error, torch.OutOfMemoryError | PassTooLargeError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


class Budget:
    """The token budget of a pass over one engine's model. `limit` is `trainer.memory.tokens_per_batch`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.tokens = limit
        """The current budget."""
        self._good_steps = 0
        self._required_good_steps = GOOD_STEPS
        self._grew = False
        """Whether the budget has grown since memory last ran out."""

    def set_limit(self, limit: int) -> None:
        """Set the configured limit. A budget that was reduced because memory ran out is not raised."""
        self.tokens = limit if self.tokens == self._limit else min(self.tokens, limit)
        self._limit = limit

    def halve(self, tried: int) -> None:
        """Halve the budget after a pass of `tried` tokens ran out of memory; it becomes at most half of `tried`."""
        self.tokens = max(1, min(self.tokens, tried) // 2)
        self._good_steps = 0
        if self._grew:
            self._required_good_steps = min(2 * self._required_good_steps, _MAX_GOOD_STEPS)
        self._grew = False

    def restore(self, tokens: int) -> None:
        """Set the budget back to `tokens`, after the sequence that had reduced it was dropped."""
        self.tokens = min(tokens, self._limit)

    def record_success(self) -> bool:
        """Record a step that did not run out of memory. Returns whether the budget grew."""
        if self.tokens >= self._limit:
            return False
        self._good_steps += 1
        if self._good_steps < self._required_good_steps:
            return False
        self.tokens = min(2 * self.tokens, self._limit)
        self._good_steps, self._grew = 0, True
        return True
