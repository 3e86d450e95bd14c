"""AdamW and its learning rate schedule, built for each step from the current settings and the `TrainState`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import get_scheduler

from pipeline.config import TrainerConfig
from trainer.engine.state import TrainState

_PROGRESS = ("last_epoch", "_step_count")
"""The entries of a scheduler's state that hold its progress; the others are settings."""


def make_optimizer(
    config: TrainerConfig, parameters: Sequence[torch.nn.Parameter], state: TrainState
) -> tuple[torch.optim.Optimizer, Any]:
    """Return the optimizer and its learning rate scheduler with the progress of `state` and the settings of `config`.

    `state` is not changed."""
    optimizer = torch.optim.AdamW(
        parameters, lr=config.optimizer.learning_rate, betas=config.optimizer.betas,
        weight_decay=config.optimizer.weight_decay, foreach=True,
    )  # fmt: skip
    name: str = config.optimizer.schedule
    if name == "constant" and config.optimizer.warmup_steps:
        name = "constant_with_warmup"
    scheduler = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=config.optimizer.warmup_steps,
        num_training_steps=max(config.max_steps, 1),
    )
    if state.optimizer is not None and state.scheduler is not None:
        # A copy, because the optimizer changes its state in place and an abandoned step must leave `state` unchanged.
        optimizer.load_state_dict(copy.deepcopy(state.optimizer))
        # The saved states hold the settings they were written under. Restore the progress only: the rates follow from
        # the current settings.
        for name in _PROGRESS:
            setattr(scheduler, name, state.scheduler[name])
        for group, base, schedule in zip(
            optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["initial_lr"] = base
            group["lr"] = base * schedule(scheduler.last_epoch)
            group["weight_decay"], group["betas"] = config.optimizer.weight_decay, config.optimizer.betas
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
    return optimizer, scheduler
