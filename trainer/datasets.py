"""Steps over something else than scored groups, on the adapter that reinforcement learning goes on with: a data set, by
TRL's supervised and preference trainers, or a version of another branch.

Such a step is one checkpoint, like one of reinforcement learning: it has the version before it as its parent, goes
through the commit protocol, and names the data set's hash as its source. The state of the policy's own optimizer stays
as it was; TRL's trainer has one of its own. `dpo` and `kto` are held close to the version before the step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import pyarrow.parquet as pq
from anyio.to_thread import run_sync
from datasets import Dataset
from transformers import AutoTokenizer

from pipeline.config import Config
from pipeline.events.base import now_us
from pipeline.log.broker import Broker
from pipeline.telemetry.logs import get_logger
from trainer.checkpoints.commits import Commits, TrainerError
from trainer.checkpoints.start import read_start
from trainer.engine.trl_source import plain_logprobs, trl_imports
from trainer.learner import Learner, PendingStep, make_learners
from trainer.recovery import catch_up
from trainer.service import user_of

with trl_imports():
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

log = get_logger("trainer.datasets")

Kind = Literal["sft", "dpo", "kto"]
_TRAINERS: dict[Kind, tuple[Any, Any]] = {
    "sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer), "kto": (KTOConfig, KTOTrainer)
}  # fmt: skip
_COLUMNS = {
    "sft": {"messages"}, "dpo": {"prompt", "chosen", "rejected"}, "kto": {"prompt", "completion", "label"}
}  # fmt: skip


class DatasetStep(NamedTuple):
    """What to train on, and how."""

    folder: Path
    """As `journeywork dataset` writes it; its split `train` is trained."""
    kind: Kind
    epochs: float = 1.0
    learning_rate: float = 1e-5
    batch_size: int = 8
    """Rows of an update."""
    max_length: int = 4096
    """Tokens of a row; longer ones are cut by TRL."""
    seed: int = 0


async def train_on(config: Config, step: DatasetStep, ready: Callable[[str], None]) -> None:
    """Take the step with the first model of the settings, as `take_step` does.

    Raises `TrainerError` for a data set without the format's columns, and where another trainer took the step."""
    await take_step(config, partial(compute, step=step), ready)


async def adopt(config: Config, version: str, ready: Callable[[str], None]) -> None:
    """Let training go on from `version`, written as `models.0.start` is: it becomes the next version of the first model
    of the settings. Raises `TrainerError` where another trainer took the step, `ConfigError` for another shape."""

    def begin_with(learner: Learner, scratch: Path) -> PendingStep:
        return learner.adopt(read_start(version, config))

    await take_step(config, begin_with, ready)


async def take_step(
    config: Config, make: Callable[[Learner, Path], PendingStep], ready: Callable[[str], None]
) -> None:
    """Publish the checkpoint that `make` writes, given the learner of the first model at its newest step and a scratch
    folder. `ready` is called with the name of the new version."""
    with TemporaryDirectory() as scratch:
        learners = await run_sync(make_learners, config, Path(scratch))
        learner = learners[config.models[0].name]
        async with Broker.connect(config.nats, name=user_of(config)) as broker:
            commits = Commits(broker, config)
            await catch_up(commits, learner)
            pending = await run_sync(make, learner, Path(scratch))
            await commits.publish(pending.manifest, pending.files)
            await run_sync(learner.commit, pending)
    ready(learner.version)


def compute(learner: Learner, scratch: Path, step: DatasetStep) -> PendingStep:
    """Train and write the checkpoint to disk. Blocks."""
    began, started_at = time.perf_counter(), now_us()
    file = step.folder / "train.parquet"
    rows = _rows(file, step.kind)
    model, state = learner.engine.model, learner.state
    model.load_adapter(state.master or state.weights)
    config_of, trainer_of = _TRAINERS[step.kind]
    on_cpu = model.device.type == "cpu"
    settings = config_of(
        output_dir=str(scratch), use_cpu=on_cpu, bf16=not on_cpu, seed=step.seed, num_train_epochs=step.epochs,
        learning_rate=step.learning_rate, per_device_train_batch_size=step.batch_size, max_length=step.max_length,
        gradient_checkpointing=not on_cpu, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    with plain_logprobs(model.device.type):
        trainer = trainer_of(
            model=model.peft, args=settings, train_dataset=rows,
            processing_class=AutoTokenizer.from_pretrained(learner.model.base),
        )  # fmt: skip
        result = trainer.train()
    metrics = {
        "dataset_loss": float(result.training_loss), "dataset_rows": float(len(rows)),
        "updates": float(result.global_step), "learning_rate": step.learning_rate,
        "step_s": time.perf_counter() - began,
    }  # fmt: skip
    after = learner.engine.state_with(state.step + 1, model.weights())
    after = dataclasses.replace(after, optimizer=state.optimizer, history=state.history | after.history)
    source = f"{step.kind}:sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    log.info("trained on a data set", source=source, **metrics)
    return learner.write_step(after, source=source, metrics=metrics, started_at=started_at)


def _rows(file: Path, kind: Kind) -> Dataset:
    try:
        table = pq.read_table(file)
    except OSError as error:
        raise TrainerError(
            f"{file} can't be read: name a folder that `journeywork dataset` wrote ({error})"
        ) from error
    if lacking := _COLUMNS[kind] - set(table.column_names):
        raise TrainerError(
            f"{file} has no column {min(lacking)!r}: write it with `journeywork dataset --as {kind}`"
        )
    used = [name for name in table.column_names if name in _COLUMNS[kind] | {"tools"}]
    return Dataset(table.select(used))
