"""One tiny model for the trainer's tests."""

from __future__ import annotations

import pytest

from tests.trainer import kit


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kit.make_model(tmp_path_factory.mktemp("tiny"))
