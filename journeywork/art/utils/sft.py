"""Supervised fine-tuning on the conversations of a file, before the training."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Literal, NoReturn, cast, get_args

from journeywork.art.backend import UnsupportedError
from journeywork.art.refused import refusing

__getattr__ = refusing(__name__)
Schedule = Literal["cosine", "linear", "constant"]


async def train_sft_from_file(
    model: Any,
    file_path: str,
    epochs: int = 1,
    batch_size: int = 2,
    peak_lr: float = 2e-4,
    schedule_type: Schedule = "linear",
    warmup_ratio: float = 0.1,
    initial_step: int = 0,
    final_step: int | None = None,
    _config: Any = None,
    verbose: bool = False,
    shuffle_buffer_size: int = 10000,
) -> None:
    """Fine-tune the base model on a JSONL file, one conversation (`messages`, and perhaps `tools`) a line, before the
    first call of `train`.

    The learning rate rises to `peak_lr` in the first `warmup_ratio` of the steps and then follows `schedule_type`. All
    conversations are shuffled, whatever `shuffle_buffer_size` is. `_config` and `verbose` have no effect. Raises as
    `model.train_sft` does; `UnsupportedError` for a part of the steps (`initial_step`, `final_step`); `ValueError` for
    an option that is out of range, and for a line that holds no conversation, which it names; `OSError` if the file
    can't be read."""
    if initial_step or final_step is not None:
        raise UnsupportedError(
            "train_sft_from_file: the fine-tuning is one piece here; leave out initial_step and final_step, and write "
            "a file with the conversations that are wanted"
        )
    if schedule_type not in get_args(Schedule):
        raise ValueError(
            f"schedule_type must be one of {', '.join(get_args(Schedule))}, not {schedule_type!r}"
        )
    if epochs < 1 or batch_size < 1:
        raise ValueError(f"epochs and batch_size must be at least 1, not {epochs} and {batch_size}")
    if not (peak_lr > 0 and 0 <= warmup_ratio < 1):
        raise ValueError(
            f"peak_lr must be above 0, and warmup_ratio from 0 to below 1; not {peak_lr} and {warmup_ratio}"
        )
    chats = await asyncio.to_thread(read_chats, Path(file_path))
    options = {
        "epochs": epochs, "batch-size": batch_size, "learning-rate": peak_lr, "schedule": schedule_type,
        "warmup": warmup_ratio,
    }  # fmt: skip
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    await cast(Any, model.backend()).train_sft(model, chats, arguments)


def read_chats(path: Path) -> list[dict[str, Any]]:
    """Return the conversations of a JSONL file. Raises `ValueError`, which names the line that holds none."""
    chats: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                chat = json.loads(line)
                roles = [message["role"] for message in chat["messages"]]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f'{path}, line {number}: write {{"messages": [{{"role": ..., "content": ...}}, ...]}}'
                ) from error
            if "assistant" not in roles:
                raise ValueError(
                    f"{path}, line {number} has no message of the assistant, so nothing to train"
                )
            chats.append({name: chat[name] for name in ("messages", "tools") if chat.get(name)})
    if not chats:
        raise ValueError(f"{path} holds no conversation")
    return chats


def create_sft_dataset_iterator(trajectories: list[Any], **options: Any) -> NoReturn:
    """Raises `UnsupportedError`: fine-tuning is one piece here, not many."""
    raise UnsupportedError(
        "create_sft_dataset_iterator: the fine-tuning is one piece here. Call model.train_sft(trajectories, "
        "TrainSFTConfig(learning_rate=..., batch_size=...)) once, or train_sft_from_file (docs/art.md)"
    )
