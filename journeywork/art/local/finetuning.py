"""Supervised fine-tuning of the base model of an installation on this machine, by `journeywork sft`.

The result is a model folder, `sft-0001`, `sft-0002` and so on, in the folder of the model. The newest is the base model
of the installation that is started next.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from journeywork.art.training import TrainingError

_PREFIX = "sft-"
_ERROR_BYTES = 2000
"""Bytes of the command's errors in a message."""


def newest_model(folder: Path) -> Path | None:
    """Return the newest fine-tuned model in the folder of a model, or `None`."""
    return max(folder.glob(f"{_PREFIX}[0-9]*"), default=None)


async def fine_tune(
    program: str, base: str, chats: Iterable[Mapping[str, Any]], folder: Path, options: Sequence[str]
) -> Path:
    """Fine-tune `base` on chats (`messages`, and perhaps `tools`), and return the folder of the new model.

    `program` is the command `journeywork`, `options` are further arguments of `journeywork sft`. Raises `TrainingError`
    if the command fails."""
    newest = newest_model(folder)
    number = int(newest.name.removeprefix(_PREFIX)) + 1 if newest else 1
    scratch = folder / f".{_PREFIX}{secrets.token_hex(4)}"
    scratch.mkdir(parents=True)
    try:
        data, out = scratch / "chats.jsonl", scratch / "model"
        data.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats), "utf-8")
        await _run([program, "sft", str(out), "--base", base, "--data", str(data), *options])
        made = folder / f"{_PREFIX}{number:04d}"
        out.rename(made)  # whole, or not there
    finally:
        shutil.rmtree(scratch)
    return made


async def _run(command: Sequence[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, errors = await process.communicate()
    finally:
        if process.returncode is None:  # cancelled
            process.kill()
            await process.wait()
    if process.returncode:
        end = errors[-_ERROR_BYTES:].decode("utf-8", "replace")
        raise TrainingError(f"`journeywork sft` ended with status {process.returncode}: {end}")
