"""The number of tokens in one pass: halved when memory runs out, and doubled again after enough good steps.

Memory that runs out in a pass of several sequences halves the budget; after `GOOD_STEPS` steps in which it did not
run out, the budget doubles, up to `trainer.memory.tokens_per_batch`. If memory runs out again at once, the next
attempt comes after twice as many good steps. A sequence that fails alone, twice, is left out of the step, since no
budget would help."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

GOOD_STEPS = 16
"""Steps without running out of memory after which the budget grows."""
_MOST_GOOD_STEPS = 1024


class PassTooLargeError(RuntimeError):
    """Memory ran out in one pass."""

    def __init__(self, indices: Sequence[int], tokens: int, why: str) -> None:
        super().__init__(indices, tokens, why)  # all of it: the error travels between processes
        self.indices, self.tokens, self.why = tuple(indices), tokens, why
        """Places of the pass's sequences in the batch; tokens of the pass, padding counted."""

    def __str__(self) -> str:
        return f"a pass of {len(self.indices)} sequence(s) and {self.tokens} tokens: {self.why}"

    @property
    def alone(self) -> int | None:
        """The place of the one sequence that the pass held. `None` where it held several."""
        return self.indices[0] if len(self.indices) == 1 else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch ran out of the device's memory, or of the host's, for which it has no type of its own."""
    return isinstance(error, torch.OutOfMemoryError | PassTooLargeError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


class Budget:
    """Tokens of a pass over one engine's model."""

    def __init__(self, most: int) -> None:
        self._most = self.tokens = self._set = most
        self._fits = sys.maxsize
        self._good = 0
        self._wait = GOOD_STEPS
        self._grew = False
        """Whether the budget has grown since memory last ran out."""

    def allow(self, most: int) -> None:
        """Apply the setting as the upper bound. A lower budget that memory enforced stays."""
        self._set = most
        most = min(most, self._fits)
        if most == self._most:
            return
        unlimited = self.tokens == self._most
        self._most = most
        self.tokens = most if unlimited else min(self.tokens, most)

    def bound(self, fits: int) -> None:
        """Bound the budget by the number of tokens that fit into memory by the formula."""
        self._fits = fits
        self.allow(self._set)

    def halve(self, tried: int) -> None:
        """Memory ran out in a pass of `tried` tokens."""
        self.tokens = max(1, min(self.tokens, tried) // 2)
        self._good = 0
        if self._grew:
            self._wait = min(2 * self._wait, _MOST_GOOD_STEPS)
        self._grew = False

    def restore(self, tokens: int) -> None:
        """Go back to `tokens`, the budget before a sequence that is now left out had halved it."""
        self.tokens = min(tokens, self._most)

    def record_success(self) -> bool:
        """Take note of a step during which memory sufficed. True where the budget grew."""
        if self.tokens >= self._most:
            return False
        self._good += 1
        if self._good < self._wait:
            return False
        self.tokens, self._good, self._grew = min(2 * self.tokens, self._most), 0, True
        return True
