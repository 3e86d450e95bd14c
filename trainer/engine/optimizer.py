"""AdamW and its learning rate schedule, built for each step from the current settings and the `TrainState`.

`trainer.engine.engine` makes a `PolicyOptimizer` for a step and calls `update` after each backward pass. Where adapters
are published in a smaller type (`PolicyModel.adapter_dtype`), the optimizer updates the master weights, which are not
rounded, with gradients that were taken at the published ones.
"""

from __future__ import annotations

import copy
import math

import torch

from pipeline.config import TrainerConfig
from trainer.engine.model import PolicyModel
from trainer.engine.state import TrainState, UntrainableError

_RATE_TIMES_PARAMETERS = 32_500
"""Between the least and the most rate, `default_rate` is this number over the parameters: 3e-4 for the demo's model."""
_LEAST_RATE, _MOST_RATE = 1e-5, 2e-3


def default_rate(parameters: int) -> float:
    """Return the learning rate for an adapter of a model with so many parameters, embeddings apart.

    Measured here (docs/training.md): 2e-3 for 0.9 million, where 6e-4 and 6e-3 learned less and 2e-2 collapsed, and
    3e-4 for the demo's 106 million, where 5e-4 collapsed and 1.5e-4 was slower. Between them and above, the rate falls
    with the parameters, to the least that others use for GRPO with LoRA at 4 billion and more. It does not
    depend on the rank, as `alpha / rank` scales the adapter (LoRA Without Regret, Thinking Machines Lab, 2025)."""
    return min(max(_RATE_TIMES_PARAMETERS / parameters, _LEAST_RATE), _MOST_RATE)


def learning_rate(config: TrainerConfig, step: int, parameters: int) -> float:
    """Return the learning rate of the step after `step` steps, for a model with so many `parameters`. It does not
    depend on the optimizer's state, which may be lost.

    The warm-up rises in equal parts and begins above 0: a step at rate 0 would cost its batch and learn nothing."""
    optimizer = config.optimizer
    peak = default_rate(parameters) if optimizer.learning_rate is None else optimizer.learning_rate
    if step < optimizer.warmup_steps:
        return peak * (step + 1) / (optimizer.warmup_steps + 1)
    left = (config.max_steps - step) / max(1, config.max_steps - optimizer.warmup_steps)
    match optimizer.schedule:
        case "constant":
            return peak
        case "linear":
            return peak * max(0.0, left)
        case "cosine":
            return peak * (1 - math.cos(math.pi * max(0.0, left))) / 2


class PolicyOptimizer:
    """The optimizer updates of one step."""

    def __init__(self, model: PolicyModel, state: TrainState) -> None:
        """Load the adapter of `state` into the model. `state`, the policy before the step, is not changed."""
        config = model.config
        self._model, self._step = model, state.step
        self._rates = config.optimizer.update_rates
        """Learning rates of the next updates, if the settings name any; the last one holds for all later updates."""
        on_gpu = model.device.type == "cuda"
        # One kernel for all parameters on a GPU.
        self.adamw = torch.optim.AdamW(model.parameters, fused=on_gpu, foreach=not on_gpu)
        if state.optimizer is not None:
            # A copy: the optimizer changes its state in place, and an abandoned step must leave `state` unchanged.
            self.adamw.load_state_dict(copy.deepcopy(state.optimizer))
        # The loaded state brings the settings that it was written under: replace them.
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate(config, state.step, model.multiplied_parameters)
            group["weight_decay"], group["betas"] = config.optimizer.weight_decay, config.optimizer.betas
        self.weights = state.weights
        """The live adapter, as it is published."""
        self.master = state.master or state.weights
        """The weights that are updated. The same object as `weights` if none is rounded."""
        model.load_adapter(state.weights)

    def update(self) -> float:
        """Take an update with the gradients of the live adapter. Returns their norm before clipping.

        Raises `UntrainableError` where it is not finite."""
        model = self._model
        norm = torch.nn.utils.clip_grad_norm_(model.parameters, model.config.optimizer.max_grad_norm)
        if not torch.isfinite(norm):
            raise UntrainableError(f"gradient norm {norm} at step {self._step}: the step is not taken")
        if self._rates:
            for group in self.adamw.param_groups:
                group["lr"] = self._rates[0]
            self._rates = self._rates[1:] or self._rates
        if self.weights is not self.master:
            model.load_adapter(self.master)  # the live adapter is the rounded one
        self.adamw.step()
        self.master = model.weights()
        self.weights = model.as_published(self.master)
        if self.weights is not self.master:
            model.load_adapter(self.weights)
        return float(norm)
