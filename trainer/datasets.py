"""Steps over something else than scored groups, on the adapter that reinforcement learning goes on with: a data set, by
TRL's supervised and preference trainers, or a version of another branch. `journeywork train --on` and `--adopt` take
them.

Such a step is one checkpoint, like one of reinforcement learning: it has the version before it as its parent, goes
through the commit protocol, and names the data set's hash as its source. The state of the policy's own optimizer stays
as it was; TRL's trainer has one of its own. `sft` trains the assistant's replies of conversations, in the sequences
that demonstrations give. `dpo` and `kto` are held close to the version before the step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import jinja2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from anyio.to_thread import run_sync
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback

from pipeline.chat.demonstrations import demonstrated_replies
from pipeline.config import Config
from pipeline.events import ExchangeRecorded, now_us, pack_ids
from pipeline.log.broker import Broker
from pipeline.telemetry.logs import get_logger
from trainer.checkpoints.commits import Commits, TrainerError
from trainer.checkpoints.start import read_start
from trainer.distillation.prompts import as_template_reads
from trainer.engine.model import PolicyModel
from trainer.learner import Learner, PendingStep, make_learners
from trainer.recovery import catch_up
from trainer.sequences import build
from trainer.service import user_of
from trainer.trl_trainers import plain_logprobs, trl_imports

with trl_imports():
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

logger = get_logger("trainer.datasets")

Kind = Literal["sft", "dpo", "kto"]
_TRAINERS: dict[Kind, tuple[Any, Any]] = {
    "sft": (SFTConfig, SFTTrainer),
    "dpo": (DPOConfig, DPOTrainer),
    "kto": (KTOConfig, KTOTrainer),
}
_COLUMNS: dict[Kind, set[str]] = {
    "sft": {"messages"},
    "dpo": {"prompt", "chosen", "rejected"},
    "kto": {"prompt", "completion", "label"},
}
"""The columns that a format must have: those that `journeywork dataset` writes."""
_IGNORED = -100
"""Label of a token that isn't trained."""
_UNRENDERABLE = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What templates raise for messages that they don't take."""


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


async def train_on(config: Config, step: DatasetStep) -> tuple[str, Counter[str]]:
    """Train the first model of the settings on a data set. Return the name of the new version, and the number of
    conversations that were left out or cut, by the reason.

    Raises `TrainerError` for a data set without the format's columns, and where another trainer took the step."""
    left_out = Counter[str]()
    with TemporaryDirectory() as scratch:
        train = partial(train_and_write, scratch=Path(scratch), step=step, left_out=left_out)
        return await _take_step(config, train), left_out


async def adopt(config: Config, version: str) -> str:
    """Let training go on from `version`, written as `models.0.start` is: it becomes the next version of the first model
    of the settings. Return the next version's name. Raises `TrainerError` where another trainer took the step,
    `ConfigError` if the adapter does not fit the model."""
    return await _take_step(config, lambda learner: learner.adopt(read_start(version, config)))


async def _take_step(config: Config, make: Callable[[Learner], PendingStep]) -> str:
    """Take a step of the first model: `make` writes its checkpoint, given the learner at the newest step; then the
    checkpoint is published. Return the name of the new version."""
    learners = await run_sync(make_learners, config)
    learner = learners[config.models[0].name]
    async with Broker.connect(config.nats, name=user_of(config)) as broker:
        commits = Commits(broker, config)
        await catch_up(commits, learner)
        pending = await run_sync(make, learner)
        await commits.publish(pending.manifest, pending.files)
        await run_sync(learner.make_current, pending)
    return learner.version


def train_and_write(learner: Learner, scratch: Path, step: DatasetStep, left_out: Counter[str]) -> PendingStep:
    """Train the learner's policy on a data set, and write the checkpoint to disk. `scratch`: a folder for TRL. Adds to
    `left_out` the number of conversations that were left out or cut, by the reason. Blocks."""
    began, started_at = time.perf_counter(), now_us()
    file = step.folder / "train.parquet"
    tokenizer = AutoTokenizer.from_pretrained(learner.model.base)
    table = _table(file, step.kind)
    rows = Dataset(table)
    if step.kind == "sft":
        tokens = conversations_as_tokens(file, table.to_pylist(), tokenizer, step.max_length, left_out)
        rows = Dataset.from_list(tokens)
    model, state = learner.engine.model, learner.state
    model.load_adapter(state.master or state.weights)
    result = _run_trl(model, tokenizer, rows, step, scratch)
    metrics = {
        "dataset_loss": float(result.training_loss),
        "dataset_rows": float(len(rows)),
        "updates": float(result.global_step),
        "learning_rate": step.learning_rate,
        "step_s": time.perf_counter() - began,
    }
    after = learner.engine.state_with(state.step + 1, model.weights())
    after = dataclasses.replace(after, optimizer=state.optimizer, history=state.history | after.history)
    source = f"{step.kind}:sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    logger.info("trained on a data set", source=source, **metrics)
    return learner.write_step(after, source=source, metrics=metrics, started_at=started_at)


def _run_trl(model: PolicyModel, tokenizer: Any, rows: Dataset, step: DatasetStep, scratch: Path) -> Any:
    """Let TRL's trainer of the step's format train the live adapter. Returns transformers' `TrainOutput`."""
    config_class, trainer_class = _TRAINERS[step.kind]
    on_cpu = model.device.type == "cpu"
    settings = config_class(
        output_dir=str(scratch),
        use_cpu=on_cpu,
        bf16=not on_cpu,
        seed=step.seed,
        num_train_epochs=step.epochs,
        learning_rate=step.learning_rate,
        per_device_train_batch_size=step.batch_size,
        max_length=step.max_length,
        gradient_checkpointing=not on_cpu,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    with plain_logprobs(model.device.type):
        trainer = trainer_class(model=model.peft, args=settings, train_dataset=rows, processing_class=tokenizer)
        trainer.remove_callback(PrinterCallback)
        return trainer.train()


def _table(file: Path, kind: Kind) -> pa.Table:
    """Read the columns of a data set that a format needs. Raises `TrainerError` if the file can't be read or lacks
    one."""
    try:
        table = pq.read_table(file)
        names = set(table.column_names)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise TrainerError(f"{file} can't be read: name a folder that `journeywork dataset` wrote ({error})") from error
    if lacking := _COLUMNS[kind] - names:
        raise TrainerError(f"{file} has no column {min(lacking)!r}: write it with `journeywork dataset --as {kind}`")
    return table.select([name for name in table.column_names if name in _COLUMNS[kind] | {"tools", "replies"}])


def conversations_as_tokens(
    file: Path, rows: Sequence[dict[str, Any]], tokenizer: Any, max_length: int, left_out: Counter[str]
) -> list[dict[str, list[int]]]:
    """Return the token sequences of conversations as TRL reads them: `input_ids`, and `labels` in which only the
    assistant's replies count. A conversation is several sequences where the template renders earlier messages
    differently later on.

    Adds to `left_out`, by the reason, the number of conversations that the template can't render or in which no reply
    begins within `max_length`, and of those that are cut there. Raises `TrainerError` if no sequence is left."""
    out = []
    for number, row in enumerate(rows):
        try:
            sequences = build(str(number), list(_calls(row, tokenizer)))
        except _UNRENDERABLE as error:
            left_out[f"can't be rendered: {type(error).__name__}: {error}"[:300]] += 1
            continue
        fitting = [sequence for sequence in sequences if sequence.loss_mask[:max_length].any()]
        for sequence in fitting:
            labels = np.where(sequence.loss_mask, sequence.ids, _IGNORED)
            out.append({"input_ids": sequence.ids.tolist(), "labels": labels.tolist()})
        if not fitting:
            left_out[f"no reply follows another message and begins within {max_length} tokens (--max-length)"] += 1
        elif len(fitting) < len(sequences) or any(len(sequence.ids) > max_length for sequence in fitting):
            left_out[f"cut at {max_length} tokens (--max-length)"] += 1
    if not out:
        reasons = "; ".join(f"{count} × {why}" for why, count in left_out.most_common(5)) or "it has no row"
        raise TrainerError(f"{file}: nothing to train: {reasons}")
    return out


def _calls(row: dict[str, Any], tokenizer: Any) -> Iterator[ExchangeRecorded]:
    """Yield the assistant's replies of a conversation as calls, as the gateway records a demonstration."""
    messages = [as_template_reads({k: v for k, v in m.items() if v is not None}) for m in row["messages"]]
    tools = row.get("tools")
    replies = list(demonstrated_replies(messages, json.loads(tools) if isinstance(tools, str) else tools))
    if (sampled := row.get("replies")) is not None:
        replies = [reply for reply in replies if reply.place in sampled]
    for seq, reply in enumerate(replies):
        prompt, whole = (
            tokenizer.apply_chat_template(fields.pop("messages"), tokenize=True, return_dict=False, **fields)
            for fields in (reply.prompt, reply.whole)
        )
        yield ExchangeRecorded(
            project="",
            trajectory="",
            seq=seq,
            model="",
            policy_version="",
            step=0,
            request=b"{}",
            response=b"{}",
            prompt_ids=pack_ids(prompt),
            sampled_ids=pack_ids(reply.reply_ids(prompt, whole)),
            logprobs=b"",
        )
