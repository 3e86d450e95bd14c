"""These tests need an NVIDIA GPU and skip where there is none. They import nothing but the trainer and what it
needs."""

from __future__ import annotations

import os

import pytest
import torch

ANYWHERE = "JOURNEYWORK_GPU_TESTS_ANYWHERE"
"""Environment variable: run on whatever there is, to try the tests themselves. That proves nothing of GPUs."""
REASON = "no CUDA GPU: torch.cuda.is_available() is false"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.timeout(300))
            if not torch.cuda.is_available() and not os.environ.get(ANYWHERE):
                item.add_marker(pytest.mark.skip(reason=REASON))
