"""The optimizer and its schedule."""

import dataclasses

import pytest
import torch
from transformers import get_scheduler

from pipeline.config import TrainerConfig, with_batch_settings
from pipeline.events import STATE_FILE
from tests.kits.settings import with_values
from tests.trainer.engine.kit import Configure, batch
from trainer.checkpoints.tensors import adapter_files, state_bytes, state_of
from trainer.engine.engine import Engine
from trainer.engine.optimizer import default_rate, learning_rate
from trainer.engine.state import TrainState


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_changed_optimizer_settings_apply_after_a_restart(engine: Engine, configured: Configure, schedule: str) -> None:
    """Regression: the optimizer's state brought its old settings along."""
    old = {"optimizer.schedule": schedule, "max_steps": 10}
    new = {"optimizer.learning_rate": 1e-4, "optimizer.weight_decay": 0.1, "optimizer.betas": (0.8, 0.9)}
    configured(old)
    state = engine.step(engine.initial_state(), batch(engine, engine.initial_state()), [0] * 6).state
    configured(old | new)
    after = engine.step(state, batch(engine, state, seed=20), [0] * 6)
    share = 0.9 if schedule == "linear" else 1.0
    assert after.metrics["learning_rate"] == pytest.approx(1e-4 * share)
    (group,) = after.state.optimizer["param_groups"]  # type: ignore[index]
    assert (group["weight_decay"], group["betas"]) == (0.1, (0.8, 0.9))
    moved = max(float((after.state.weights[k] - state.weights[k]).abs().max()) for k in state.weights)
    assert 0 < moved < 1e-3
    configured(old)
    moved = engine.step(state, batch(engine, state, seed=20), [0] * 6).state.weights
    assert max(float((moved[k] - state.weights[k]).abs().max()) for k in moved) > 1e-3


@pytest.mark.parametrize(
    ("parameters", "rate"), [(0.9e6, 2e-3), (108.6e6, 3e-4), (440e6, 7.4e-5), (3.6e9, 1e-5), (30e9, 1e-5)]
)
def test_rate_follows_from_the_size_of_the_model(parameters: float, rate: float) -> None:
    assert learning_rate(TrainerConfig(), 0, int(parameters)) == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_no_step_is_taken_at_rate_0(schedule: str) -> None:
    """Regression: a warm-up began at 0, so the first step cost its batch and learned nothing."""
    config = with_values(
        TrainerConfig(), {"optimizer.schedule": schedule, "optimizer.warmup_steps": 4, "max_steps": 12}
    )
    rates = [learning_rate(config, step, 10**9) / default_rate(10**9) for step in range(12)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(0 < rate <= 1 for rate in rates)


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedules_are_those_of_transformers_after_the_warmup(schedule: str, warmup: int) -> None:
    given = {"optimizer.schedule": schedule, "optimizer.warmup_steps": warmup, "max_steps": 12}
    config = with_values(TrainerConfig(), given)
    unused = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    theirs = get_scheduler(schedule, unused, num_warmup_steps=warmup, num_training_steps=12).lr_lambdas[0]
    for step in range(warmup, 13):
        assert learning_rate(config, step, 10**9) / default_rate(10**9) == pytest.approx(theirs(step), abs=1e-12)


def test_a_learning_rate_that_a_batch_chooses_is_the_rate_of_its_step(engine: Engine) -> None:
    """Regression: the installation's schedule and warm-up changed it."""
    kept = engine.config
    given = {"optimizer.schedule": "linear", "optimizer.warmup_steps": 2, "max_steps": 4}
    state = engine.initial_state()
    for rate in (1e-3, 2e-3):
        engine.configure(with_batch_settings(with_values(kept, given), {"optimizer.learning_rate": rate}))
        result = engine.step(state, batch(engine, state), [0] * 6)
        assert result.metrics["learning_rate"] == rate
        state = result.state
    engine.configure(kept)


def stored(state: TrainState, engine: Engine) -> TrainState:
    """`state` as a checkpoint's files give it back; the adapters of earlier steps come from earlier checkpoints."""
    files = adapter_files(state.weights, engine.model.lora, "base") | {STATE_FILE: state_bytes(state)}
    return dataclasses.replace(state_of(state.step, files), history=state.history)


SCHEDULES: dict[str, dict[str, object]] = {
    "constant": {"optimizer.schedule": "constant"},
    "warm-up": {"optimizer.schedule": "constant", "optimizer.warmup_steps": 3},
    "linear": {"optimizer.schedule": "linear", "optimizer.warmup_steps": 2, "max_steps": 8},
    "updates": {"optimizer.epochs": 2, "optimizer.minibatches": 2},
}


@pytest.mark.parametrize(
    ("schedule", "dtype"),
    [*((name, "float32") for name in SCHEDULES), ("warm-up", "bfloat16"), ("updates", "bfloat16")],
)
def test_a_run_resumed_after_every_step_equals_an_uninterrupted_run(tiny_base: str, schedule: str, dtype: str) -> None:
    """The same learning rates and the same bits of every weight, the float32 masters of rounded adapters included."""
    values = {"lora.rank": 4, "lora.dtype": dtype, "optimizer.learning_rate": 1e-2, "logprob_bound": 1.0}
    engine = Engine(tiny_base, with_values(TrainerConfig(), values | SCHEDULES[schedule]))
    start = engine.initial_state()
    batches = [batch(engine, start, seed=20 * i) for i in range(5)]

    def run(resumed: bool) -> tuple[TrainState, list[float]]:
        state, rates = start, []
        for examples in batches:
            result = engine.step(state, examples, [0, 0, 1, 1, 2, 2])
            rates.append(result.metrics["learning_rate"])
            state = stored(result.state, engine) if resumed else result.state
        return state, rates

    (whole, rates), (pieces, again) = run(resumed=False), run(resumed=True)
    assert again == rates
    assert all(torch.equal(whole.weights[k], pieces.weights[k]) for k in whole.weights)
    assert (whole.master is None) == (pieces.master is None) == (dtype == "float32")
    assert all(torch.equal(v, pieces.master[k]) for k, v in (whole.master or {}).items())  # type: ignore[index]
    if schedule == "linear":
        assert rates == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2 * 5 / 6, 1e-2 * 4 / 6])
