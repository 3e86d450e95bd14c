"""An engine in float64, which the tests of a module share."""

from collections.abc import Iterator

import pytest

from pipeline.config import TrainerConfig
from tests.kits.settings import with_values
from tests.trainer.engine.kit import Configure
from tests.trainer.kit import exactly
from trainer.engine.engine import Engine


@pytest.fixture(scope="module")
def engine(tiny_base: str) -> Engine:
    values = {"dtype": "float64", "lora.rank": 4, "optimizer.learning_rate": 1e-2}
    return exactly(Engine(tiny_base, with_values(TrainerConfig(), values)))


@pytest.fixture
def configured(engine: Engine) -> Iterator[Configure]:
    """Set settings of the engine for one test."""
    before = engine.config
    yield lambda values: engine.configure(with_values(before, values))
    engine.configure(before)
