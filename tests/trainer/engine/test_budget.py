"""The token budget of a pass, as memory runs out or suffices."""

from __future__ import annotations

import pickle

import pytest
import torch

from trainer.engine.budget import GOOD_STEPS, Budget, PassTooLargeError, is_out_of_memory


def test_out_of_memory_errors_are_recognised_and_can_be_pickled() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("a bug"))
    error = pickle.loads(pickle.dumps(PassTooLargeError((3,), 70, "no room")))
    assert is_out_of_memory(error)
    assert (error.indices, error.tokens, error.only_index) == ((3,), 70, 3)
    assert str(error) == "out of memory in a pass of 1 sequence(s) and 70 tokens: no room"
    assert PassTooLargeError((3, 4), 70, "").only_index is None


def test_the_budget_halves_and_doubles_again_after_good_steps() -> None:
    budget = Budget(1000)
    assert not budget.record_success()
    budget.halve(400)
    assert budget.tokens == 200
    grew = [budget.record_success() for _ in range(3 * GOOD_STEPS)]
    assert grew == ([False] * (GOOD_STEPS - 1) + [True]) * 3
    assert budget.tokens == 1000  # never beyond the setting


def test_the_budget_waits_longer_after_each_growth_that_fails() -> None:
    budget = Budget(1000)
    budget.halve(1000)
    waits = []
    for _ in range(9):
        n = 1
        while not budget.record_success():
            n += 1
        waits.append(n)
        budget.halve(budget.tokens)
    assert waits == [16, 32, 64, 128, 256, 512, 1024, 1024, 1024]


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


def test_a_budget_never_reaches_zero() -> None:
    budget = Budget(4)
    for _ in range(5):
        budget.halve(4)
    assert budget.tokens == 1
