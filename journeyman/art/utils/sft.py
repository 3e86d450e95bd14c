"""Supervised fine-tuning, which is done before the training here: the functions say how."""

from __future__ import annotations

from typing import Any, NoReturn

from journeyman.art.backend import UnsupportedError


def _refuse(name: str) -> NoReturn:
    raise UnsupportedError(
        f"{name}: the trainer takes steps by reinforcement learning only. Fine-tune before the training with "
        "`journeyman sft OUT --base MODEL --data chats.jsonl`, and set base_model to OUT (docs/art.md)"
    )


def create_sft_dataset_iterator(trajectories: list[Any], **options: Any) -> NoReturn:
    """Raises `UnsupportedError`."""
    _refuse("create_sft_dataset_iterator")


async def train_sft_from_file(model: Any, file_path: str, **options: Any) -> NoReturn:
    """Raises `UnsupportedError`."""
    _refuse("train_sft_from_file")
