"""Supervised fine-tuning of the model that an installation trains: a step of its own, between steps of `train`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from journeywork.art.gateway import Batch, Gateway, Member
from journeywork.art.training import StepResult, await_step, send

_AUTO_BATCH = 2
"""ART's batch size, if none is chosen."""
_MAX_UPDATES = 4096


def batches_of(
    chats: Sequence[Mapping[str, Any]], size: int | Literal["auto"]
) -> list[list[Mapping[str, Any]]]:
    """Return the conversations of each update."""
    count = _AUTO_BATCH if size == "auto" else size
    return [list(chats[i : i + count]) for i in range(0, len(chats), count)]


async def train_chats(
    gateway: Gateway, model: str, batches: Sequence[Sequence[Mapping[str, Any]]], rates: Sequence[float]
) -> StepResult:
    """Take one step of an optimizer update per batch of conversations (`messages`, perhaps `tools`), and return once
    the new version is served. `rates`: the learning rate of each update; of more updates, the last one.

    Raises `ValueError` without a conversation or with more than 4,096 updates, and `TrainingError`."""
    if not batches or not all(batches):
        raise ValueError("train_sft: there is no trajectory to train on")
    if len(batches) > _MAX_UPDATES:
        raise ValueError(
            f"train_sft: {len(batches)} updates in one call; at most {_MAX_UPDATES}, or larger batches"
        )
    batch_id = f"sft-{secrets.token_hex(6)}"
    names = [f"{batch_id}-{number}" for number in range(len(batches))]
    settings = {
        "loss.type": "sft", "loss.weighting": "loss", "optimizer.epochs": 1, "optimizer.minibatches": len(names),
        "optimizer.update_rates": list(rates),
    }  # fmt: skip
    batch = Batch(id=batch_id, groups=names, settings=settings)
    members = {
        name: [
            Member(
                id=f"{name}-{at}", exchanges=[], demonstration=dict(chat), reward=1.0, metrics={}, metadata={},
                batch=batch,
            )
            for at, chat in enumerate(chats)
        ]
        for name, chats in zip(names, batches, strict=True)
    }  # fmt: skip
    await send(gateway, model, members, dict.fromkeys(names, ""), "train")
    return await await_step(gateway, model, names)
