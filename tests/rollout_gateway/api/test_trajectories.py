"""What a run's results must be, where no gateway has to run."""

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config import Config, ModelConfig
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.trajectories import check_batch
from rollout_gateway.capture.registry import BatchRequest, Completion
from rollout_gateway.http.errors import ApiError


def test_a_batch_has_the_settings_that_its_models_trainer_permits() -> None:
    """The trainer asks the model's own settings: a batch that is taken here must not fail there."""
    own = ModelConfig(name="own", trainer={"batch_settings": ["lora"]})
    gateway: Any = SimpleNamespace(config=Config(models=(own, ModelConfig(name="other"))))

    def check(model: str, setting: str) -> None:
        batch = BatchRequest(id="b", groups=("g",), settings={setting: 2})
        check_batch(gateway, Completion(batch=batch), Access(operator=True), model, "g")

    check("own", "lora.rank")
    check("other", "loss.epsilon")
    for model, setting in (("own", "loss.epsilon"), ("other", "lora.rank")):
        with pytest.raises(ApiError, match="does not let a batch choose it") as refused:
            check(model, setting)
        assert refused.value.code == "invalid_settings"
