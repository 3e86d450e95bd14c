"""Which runs of a step taught it to lose a task, to first order.

A step moves the weights against the gradient of its loss, which is a sum over runs. To first order each run changes the
loss of another task by the inner product of the two gradients (TracIn: G. Pruthi, F. Liu, S. Kale and M. Sundararajan
2020, "Estimating training data influence by tracing gradient descent", equation 1). The task's loss is that of
imitating the runs of it that got a reward: each weighs as much as its reward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from anyio.to_thread import run_sync

from pipeline.config import Config, ConfigError, ModelConfig, TrainerConfig, with_values
from pipeline.events import CheckpointPublished, GroupScored
from pipeline.lake_files import S3
from pipeline.log.broker import Broker, Recorded
from pipeline.names import parse_version, version_address
from trainer.batches.graders import limit_graders
from trainer.batches.groups import Example, TrainingGroup, examples, trainable_members
from trainer.batches.histories import Histories
from trainer.batches.sampling import defaults_of
from trainer.batches.tasks import EarlierRuns
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.start import read_start
from trainer.checkpoints.tensors import weights_of
from trainer.engine.engine import Engine
from trainer.engine.late import LateRunsError, is_late
from trainer.engine.state import Weights


class Influence(NamedTuple):
    """What one run of the step did to the task."""

    trajectory: str
    group: str
    reward: float
    influence: float
    """Inner product of the run's part of the step's gradient with the task's, over the square of the task's norm.
    Negative: the run's part of the step moved the policy away from what got a reward in the task."""


async def influences(
    config: Config, version: str, tasks: Sequence[str] = (), tell: Callable[[str], None] = lambda _: None
) -> list[Influence]:
    """Return the runs that `version` learned from, the most harmful first. `tell` gets a line about each part of the
    work as it begins.

    The task's runs are those of validation groups (as of `journeywork bisect` and `eval`) that versions before it
    played; of the tasks named `tasks`, if any are named. Left out are what a teacher said, the KL terms and the entropy
    bonus of the loss, and tokens that were too old for the step. Raises `ConfigError` if there is no such version, or
    nothing of it or of the tasks is on the log, and `CheckpointError` if a checkpoint is damaged."""
    name, step = parse_version(version)
    model = next((m for m in config.models if m.name == name), None)
    if model is None or not step:
        raise ConfigError(f"{version} is no trained version of {', '.join(m.name for m in config.models)}")
    async with Broker.connect(config.nats, name="influence", provision=False) as broker:
        branch = config.trainer.branch
        published = await broker.read(
            CheckpointPublished, project=config.project, model=name, step=step, branch=branch
        )
        if not published:
            raise ConfigError(f"the log has no {version}")
        learned, wanted = published[-1].event, set(published[-1].event.groups)
        scored = await broker.read(GroupScored, project=config.project, model=name)
        step_groups = [r for r in scored if r.event.branch == branch and r.event.group in wanted]
        lost = [r for r in scored if _is_of_task(r.event, step, tasks)]
        if not step_groups or not lost:
            raise ConfigError(
                f"the log holds {len(step_groups)} groups that {version} learned from, and {len(lost)} validation "
                "groups of the tasks by versions before it: it needs both (`journeywork bisect` plays the tasks)"
            )
        tell(
            f"reading {len(step_groups)} groups that {version} learned from, {len(lost)} of tasks, and the model"
        )
        with TemporaryDirectory() as scratch:
            settings, weights = await run_sync(_before, config, model, learned, tell)
            # A run's influence is that of its rewards, not of what a teacher said, of the nearness to a reference or of
            # the entropy.
            without = {"distill.weight": 0.0, "loss.beta": 0.0, "loss.entropy_coef": 0.0}
            settings = with_values(settings, without)
            engine = await run_sync(Engine, model.base, settings, Path(scratch))
            defaults = defaults_of(engine.model.peft.get_base_model(), config.vllm.flags)
            histories = Histories(broker, settings, defaults)
            batch, of_task = await _read(histories, step_groups), await _read(histories, lost)
            if settings.loss.baseline == "task":
                of_branch = [r for r in scored if r.event.branch == branch]
                _add_earlier(batch, of_branch, settings.loss.turn_discount)
            if weights is not None:
                engine.model.load_adapter(weights)
            trained = await run_sync(_as_trained, engine, settings, config.feedback.max_share, batch, step)
            return await run_sync(_compute, engine, settings, trained, of_task, tell)


def _is_of_task(event: GroupScored, step: int, tasks: Sequence[str]) -> bool:
    return (
        event.split == "val" and event.branch == "main" and (not tasks or event.task in tasks)
        and all(m.last_step < step for m in event.members) and any(m.reward > 0 for m in event.members)
    )  # fmt: skip


def _before(
    config: Config, model: ModelConfig, learned: CheckpointPublished, tell: Callable[[str], None]
) -> tuple[TrainerConfig, Weights | None]:
    """The settings of the step, or the model's present ones if the step's folder is gone; and the adapter that the step
    began with, `None` for that of step 0."""
    checkpoints, step = Checkpoints.of(config, learned.model), learned.step
    there = checkpoints.steps()
    if step in there:
        settings = msgspec.convert(checkpoints.read(step)[0].config, TrainerConfig)
    else:
        settings = config.trainer_of(model)
        tell(f"the settings of step {step} are gone with its folder; the present ones of the model are used")
    if step == 1:
        return settings, None
    if step - 1 in there:
        return settings, weights_of(checkpoints.read(step - 1)[1])
    lake = config.store.dir if config.store.dir.startswith(S3) else config.path(config.store.dir)
    return settings, weights_of(
        read_start(f"{lake}#{version_address(learned.branch, learned.parent)}", config).files
    )


async def _read(histories: Histories, recorded: Sequence[Recorded[GroupScored]]) -> list[TrainingGroup]:
    """The groups with their sequences; those whose exchanges are gone are left out. Raises `ConfigError` if none is
    left."""
    groups = [TrainingGroup(_as_training(r.event), r.place) for r in recorded]
    gone = await histories.read_all(groups)
    readable = [g for g in groups if g.place not in gone and g.sequences]
    if not readable and len(gone) == len(groups):
        first = next(iter(gone.values())).detail
        raise ConfigError(f"the log no longer holds {first}: `journeywork replay` puts it back")
    if not readable:
        names = ", ".join(sorted(g.event.group for g in groups)[:5])
        raise ConfigError(
            f"the runs of {names} have no token that can be trained: each has no result, or its calls failed, were "
            "greedy or had settings that the trainer can't apply"
        )
    return readable


def _as_training(event: GroupScored) -> GroupScored:
    """The event with all members in the training split: no sequences are built of others."""
    members = tuple(msgspec.structs.replace(m, split="train") for m in event.members)
    return msgspec.structs.replace(event, members=members)


def _add_earlier(
    batch: Sequence[TrainingGroup], scored: Sequence[Recorded[GroupScored]], discount: float
) -> None:
    """Give the groups the earlier runs of their tasks in `scored`: what the log still holds of the branch."""
    earlier = EarlierRuns(discount)
    for r in scored:
        earlier.add(r.event, trainable_members(r.event), r.seq)
    for group in batch:
        group.earlier = earlier.before(group.event, group.place.seq)


def _as_trained(
    engine: Engine, settings: TrainerConfig, max_share: float, batch: Sequence[TrainingGroup], step: int
) -> tuple[Sequence[TrainingGroup], list[Example]]:
    """The groups and examples as the step took them: without the tokens that were too old for it, with its correction
    of late runs, and with what one key's feedback may decide. Raises `ConfigError` if no token is left."""
    while True:
        refusals = [g.bound_staleness(step - 1, settings) for g in batch]
        batch = [g for g, refusal in zip(batch, refusals, strict=True) if refusal is None]
        if not batch:
            reasons = "; ".join(refusal.detail for refusal in refusals if refusal)
            raise ConfigError(f"by the settings used, step {step} can't have trained its groups: {reasons}")
        made, _ = limit_graders(batch, settings, max_share)
        try:
            return batch, engine.with_late(step - 1, made, _numbers(batch))[0]
        except LateRunsError as error:
            for group in batch:
                if any(is_late(s, step - 1, settings) for s in group.sequences or ()):
                    group.late_refused = str(error)


def _compute(
    engine: Engine,
    settings: TrainerConfig,
    trained: tuple[Sequence[TrainingGroup], list[Example]],
    of_task: Sequence[TrainingGroup],
    tell: Callable[[str], None],
) -> list[Influence]:
    """Blocks. `trained`: what `_as_trained` returns."""
    tell("computing the gradient of the tasks")
    imitation = with_values(settings, {"loss.type": "sft"})
    engine.configure(imitation)
    task = _gradient(engine, examples(of_task, imitation), _numbers(of_task))
    scale = float(task @ task)
    if not scale:
        raise ConfigError("the runs of the task have no gradient: none of them has a reward above 0")
    engine.configure(settings)
    batch, made = trained
    runs = [(g, name) for g in batch for name in dict.fromkeys(s.trajectory for s in g.sequences or ())]
    out = []
    for number, (group, name) in enumerate(runs, 1):
        tell(f"computing the gradient of run {number} of {len(runs)}")
        reward = next(m.reward for m in group.event.members if m.trajectory == name)
        alone = [e if e.sequence.trajectory == name else _silent(e) for e in made]
        part = float(_gradient(engine, alone, _numbers(batch)) @ task) / scale
        out.append(Influence(name, group.event.group, reward, part))
    return sorted(out, key=lambda i: i.influence)


def _numbers(groups: Sequence[TrainingGroup]) -> list[int]:
    return [i for i, g in enumerate(groups) for _ in g.sequences or ()]


def _silent(example: Example) -> Example:
    """The example as a part of the batch that has no gradient of its own."""
    calls = None if example.call_advantages is None else np.zeros_like(example.call_advantages)
    return dataclasses.replace(example, advantage=0.0, call_advantages=calls, teaching=None, lessons=())


def _gradient(engine: Engine, made: Sequence[Example], groups: Sequence[int]) -> torch.Tensor:
    """The gradient of a batch's loss, over all weights of the adapter, in float64."""
    engine.model.peft.zero_grad(set_to_none=True)
    engine.passes.gradients(made, groups)
    parts = [p.grad for p in engine.model.parameters]
    return torch.cat([
        (torch.zeros_like(p) if g is None else g).flatten().double().cpu()
        for p, g in zip(engine.model.parameters, parts, strict=True)
    ])  # fmt: skip
