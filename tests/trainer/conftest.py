"""One tiny model for the trainer's tests, and the service that trains it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pipeline.config import NatsConfig
from tests.conftest import NatsServer
from tests.trainer import kit


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kit.make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def settings(nats_config: NatsConfig, tiny_base: str, tmp_path: Path) -> kit.Settings:
    return partial(kit.settings, tiny_base, tmp_path, nats_config)


@pytest.fixture
def on_new_log(start_nats: Callable[[], NatsServer], tiny_base: str, tmp_path: Path) -> kit.Settings:
    """As `settings`, but each call is for a new log and a run directory of the given name."""
    return lambda folder, **trainer: kit.settings(
        tiny_base, tmp_path / folder, NatsConfig(url=start_nats().url), **trainer
    )


@pytest.fixture
def training(nats_config: NatsConfig, tiny_base: str, tmp_path: Path) -> kit.Training:
    return partial(kit.training, nats_config, tiny_base, tmp_path)
