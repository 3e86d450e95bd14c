"""One tiny model for the trainer's tests, and the service that trains it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from pipeline.config import NatsConfig
from tests.trainer import kit


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kit.make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def settings(nats_config: NatsConfig, tiny_base: str, tmp_path: Path) -> kit.Settings:
    return partial(kit.settings, tiny_base, tmp_path, nats_config)


@pytest.fixture
def training(nats_config: NatsConfig, tiny_base: str, tmp_path: Path) -> kit.Training:
    return partial(kit.training, nats_config, tiny_base, tmp_path)
