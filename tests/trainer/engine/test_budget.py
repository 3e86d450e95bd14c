"""The token budget of a pass, as memory runs out or suffices."""

from __future__ import annotations

import pickle

import pytest
import torch

from trainer.engine.fitting import Budget, PassTooLargeError, is_out_of_memory


def test_out_of_memory_errors_are_recognised_and_can_be_pickled() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory"))
    assert not is_out_of_memory(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    assert not is_out_of_memory(RuntimeError("a bug"))
    error = pickle.loads(pickle.dumps(PassTooLargeError((3,), 70, "no room")))
    assert is_out_of_memory(error)
    assert (error.indices, error.tokens, error.only_index) == ((3,), 70, 3)
    assert str(error) == "out of memory in a pass of 1 sequence(s) and 70 tokens: no room"
    assert PassTooLargeError((3, 4), 70, "").only_index is None


@pytest.mark.parametrize(("most", "expected"), [(2000, 250), (100, 100), (500, 250)])
def test_a_changed_limit_does_not_raise_a_reduced_budget(most: int, expected: int) -> None:
    budget = Budget(500)
    budget.halve(500)
    budget.set_limit(most)
    assert budget.tokens == expected
    budget.set_limit(60)
    assert budget.tokens == 60
    free = Budget(500)
    free.set_limit(most)
    assert free.tokens == most
