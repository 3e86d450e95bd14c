"""The optimizer and its schedule, as a step finds them."""

from __future__ import annotations

import pytest

from pipeline.config import LoraConfig, OptimizerConfig, TrainerConfig, with_values
from tests.trainer.engine.test_engine import batch
from tests.trainer.kit import exactly
from trainer.engine.engine import Engine


@pytest.fixture(scope="module")
def engine(tiny_base: str, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    config = TrainerConfig(
        dtype="float64", lora=LoraConfig(rank=4), optimizer=OptimizerConfig(learning_rate=1e-2)
    )
    return exactly(Engine(tiny_base, config, tmp_path_factory.mktemp("scratch")))


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_changed_settings_of_the_optimizer_hold_after_a_restart(engine: Engine, schedule: str) -> None:
    """The fault that was: the optimizer's state brought its old settings along."""
    old = with_values(
        engine.config, {"optimizer.learning_rate": 1e-2, "optimizer.schedule": schedule, "max_steps": 10}
    )
    new = with_values(
        old, {"optimizer.learning_rate": 1e-4, "optimizer.weight_decay": 0.1, "optimizer.betas": (0.8, 0.9)}
    )
    kept = engine.config
    engine.configure(old)
    state = engine.step(engine.initial_state(), batch(engine, engine.initial_state()), [0] * 6).state
    engine.configure(new)
    after = engine.step(state, batch(engine, state, seed=20), [0] * 6)
    share = 0.9 if schedule == "linear" else 1.0
    assert after.metrics["learning_rate"] == pytest.approx(1e-4 * share)
    (group,) = after.state.optimizer["param_groups"]  # type: ignore[index]
    assert (group["weight_decay"], group["betas"]) == (0.1, (0.8, 0.9))
    moved = max(float((after.state.weights[k] - state.weights[k]).abs().max()) for k in state.weights)
    assert 0 < moved < 1e-3
    engine.configure(old)
    moved = engine.step(state, batch(engine, state, seed=20), [0] * 6).state.weights
    assert max(float((moved[k] - state.weights[k]).abs().max()) for k in moved) > 1e-3
    engine.configure(kept)


def test_the_inverse_root_falls_without_an_end(engine: Engine) -> None:
    kept = engine.config
    engine.configure(
        with_values(
            kept,
            {
                "optimizer.learning_rate": 1e-3,
                "optimizer.schedule": "inverse_sqrt",
                "optimizer.warmup_steps": 1,
            },
        )
    )
    state, rates = engine.initial_state(), []
    for _ in range(5):
        result = engine.step(state, batch(engine, state), [0] * 6)
        state = result.state
        rates.append(result.metrics["learning_rate"])
    engine.configure(kept)
    assert rates == pytest.approx([0, 1e-3, 1e-3 / 2**0.5, 1e-3 / 3**0.5, 1e-3 / 2])
