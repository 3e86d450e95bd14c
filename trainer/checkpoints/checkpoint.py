"""Checkpoints on disk: complete or not there.

    <checkpoints>/<model>/step-00000012/
        adapter_config.json  adapter_model.safetensors     PEFT's format: what vLLM loads
        state.pt                                           optimizer, scheduler, random state
        manifest.json                                      what it was made from, SHA-256 of every file
    <checkpoints>/<model>/best.json                        which step validated best
    <checkpoints>/<model>/log                              names the log that these checkpoints were published on

A checkpoint is written into a folder with a temporary name, every file is fsynced, the manifest comes last, and a
rename makes it appear. Whatever a crash leaves behind under a temporary name is no checkpoint and is deleted.

Errors: `CheckpointError`; the message says what to do.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import safetensors.torch
import torch

from pipeline import crash
from pipeline.config import Config
from pipeline.events import CheckpointPublished, pack_seqs
from pipeline.names import subject_token
from pipeline.telemetry.logs import get_logger
from trainer.engine.state import TrainState, Weights

if TYPE_CHECKING:
    from peft import LoraConfig

log = get_logger("trainer.checkpoints.checkpoint")

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
STATE_FILE = "state.pt"
MANIFEST_FILE = "manifest.json"
BEST_FILE = "best.json"
TRIES_FILE = "tries"
LOG_FILE = "log"


class CheckpointError(RuntimeError):
    """A checkpoint that can't be used."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is made from; the log's `policy.checkpoint` event says the same."""

    project: str
    model: str
    step: int
    version: str
    parent: str
    batch_id: str
    groups: tuple[str, ...]
    group_seqs: tuple[int, ...]
    group_times: tuple[int, ...] = ()
    """Stream times of the groups' events, in microseconds; empty in manifests from before they were recorded."""
    config_hash: str
    config: dict[str, Any]
    base_model: str
    adapter: str
    adapter_sha256: str
    adapter_bytes: int
    files: dict[str, str]
    metrics: dict[str, float]
    started_at: int
    written_at: int
    branch: str = "main"
    trace: dict[str, str] = {}
    """Headers under which the event is published (W3C trace context)."""

    def event(self) -> CheckpointPublished:
        return CheckpointPublished(
            project=self.project, at=self.written_at, model=self.model, step=self.step, version=self.version,
            parent=self.parent, batch_id=self.batch_id, groups=self.groups, group_seqs=pack_seqs(self.group_seqs),
            group_times=pack_seqs(self.group_times),
            config_hash=self.config_hash, base_model=self.base_model, adapter=self.adapter,
            adapter_sha256=self.adapter_sha256, adapter_bytes=self.adapter_bytes, files=self.files,
            metrics=self.metrics, started_at=self.started_at, branch=self.branch,
        )  # fmt: skip


def batch_id(parent: str, groups: tuple[str, ...], config_hash: str) -> str:
    """Names a step by what goes into it: the same inputs give the same id."""
    text = "\0".join((parent, config_hash, *groups))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def adapter_files(weights: Weights, lora: LoraConfig, base: str) -> dict[str, bytes]:
    """The PEFT adapter folder as bytes, the same for the same weights."""
    settings = {k: v for k, v in lora.to_dict().items() if v is not None}
    settings |= {"base_model_name_or_path": base, "inference_mode": True}
    settings["target_modules"] = sorted(settings["target_modules"])
    return {
        "adapter_config.json": msgspec.json.format(
            msgspec.json.encode(settings, order="sorted", enc_hook=_plain), indent=2
        ),
        "adapter_model.safetensors": safetensors.torch.save({k: v.contiguous() for k, v in weights.items()}),
    }


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(getattr(value, "value", value))


def pack(files: Mapping[str, bytes]) -> bytes:
    """One uncompressed tar, the same for the same files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(files):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(files[name]), 0o644
            tar.addfile(info, io.BytesIO(files[name]))
    return out.getvalue()


def unpack(data: bytes) -> dict[str, bytes]:
    """The files of an adapter tar; raises `CheckpointError` on anything but plain files at its root."""
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for info in tar:
            content = tar.extractfile(info)
            if not info.isreg() or "/" in info.name or content is None:
                raise CheckpointError(f"the adapter's tar holds {info.name!r}, which is no plain file")
            files[info.name] = content.read()
    return files


def weights_of(files: Mapping[str, bytes]) -> Weights:
    weights: Weights = safetensors.torch.load(files["adapter_model.safetensors"])
    return weights


def state_bytes(state: TrainState) -> bytes:
    out = io.BytesIO()
    torch.save({"optimizer": state.optimizer, "scheduler": state.scheduler, "rng": state.rng}, out)
    return out.getvalue()


class Best(msgspec.Struct, frozen=True):
    """The checkpoint with the highest mean validation reward."""

    step: int
    reward: float
    trajectories: int
    std: float = 0.0
    """Sample standard deviation of the rewards."""

    def beaten_by(self, other: Best) -> bool:
        """Whether the 95 % interval of the difference of the means lies above 0."""
        error: float = (self.std**2 / self.trajectories + other.std**2 / other.trajectories) ** 0.5
        return other.reward - self.reward > 1.96 * error


class Checkpoints:
    """One model's folder of checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, config: Config, model: str) -> Checkpoints:
        branch = config.trainer.branch
        line = () if branch == "main" else ("branches", subject_token(branch).replace("/", "%2F"))
        return cls(config.path(config.trainer.checkpoints, *line, subject_token(model).replace("/", "%2F")))

    def open_to_write(self) -> None:
        """Make the folder, and clear what a crash left half-written; only the one writer may call it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".tmp-*"):
            log.info("removed an incomplete checkpoint", folder=str(leftover))
            shutil.rmtree(leftover)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        return sorted(int(p.name[5:]) for p in self.folder.glob("step-*") if p.name[5:].isdigit())

    def write(self, manifest: Manifest, files: Mapping[str, bytes]) -> Path:
        """Make the checkpoint appear, whole; one of the same step from before is replaced."""
        target = self.path(manifest.step)
        temporary = self.folder / f".tmp-{target.name}-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name, content in files.items():
            _write_durably(temporary / name, content)
        _write_durably(
            temporary / MANIFEST_FILE, msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        )
        _sync_folder(temporary)
        if target.exists():
            shutil.rmtree(target)
        crash.point("trainer.before_rename")
        temporary.rename(target)
        crash.point("trainer.after_rename")
        _sync_folder(self.folder)
        return target

    def read(self, step: int) -> tuple[Manifest, dict[str, bytes]]:
        """The checkpoint, every file compared with its digest; raises `CheckpointError`."""
        folder = self.path(step)
        try:
            manifest = msgspec.json.decode((folder / MANIFEST_FILE).read_bytes(), type=Manifest)
            files = {name: (folder / name).read_bytes() for name in manifest.files}
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(f"{folder} is no complete checkpoint: {error}") from error
        for name, content in files.items():
            if hashlib.sha256(content).hexdigest() != manifest.files[name]:
                raise CheckpointError(
                    f"{folder / name} is not what was written: restore or delete the folder"
                )
        return manifest, files

    def newest(self) -> tuple[Manifest, dict[str, bytes]] | None:
        """The newest checkpoint that is complete and undamaged; damaged ones are named and passed over."""
        for step in reversed(self.steps()):
            try:
                return self.read(step)
            except CheckpointError as error:
                log.error("checkpoint passed over", reason=str(error))
        return None

    def best(self) -> Best | None:
        """The best by validation; none while nothing was validated."""
        try:
            return msgspec.json.decode((self.folder / BEST_FILE).read_bytes(), type=Best)
        except FileNotFoundError:
            return None

    def set_best(self, best: Best) -> None:
        temporary = self.folder / f"{BEST_FILE}.tmp"
        _write_durably(temporary, msgspec.json.encode(best))
        temporary.replace(self.folder / BEST_FILE)

    def log_name(self) -> str:
        """Which log the checkpoints belong to; empty where that was never noted."""
        path = self.folder / LOG_FILE
        return path.read_text("utf-8").strip() if path.exists() else ""

    def set_log_name(self, name: str) -> None:
        temporary = self.folder / f"{LOG_FILE}.tmp"
        _write_durably(temporary, name.encode())
        temporary.replace(self.folder / LOG_FILE)
        _sync_folder(self.folder)

    def count_try(self, batch: str) -> int:
        """How often the computation of `batch` was begun without an end, this time included."""
        path = self.folder / TRIES_FILE
        before = path.read_text().split() if path.exists() else []
        tries = 1 + (int(before[1]) if before[:1] == [batch] and len(before) == 2 else 0)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(f"{batch} {tries}")
        temporary.replace(path)
        return tries

    def forget_tries(self) -> None:
        (self.folder / TRIES_FILE).unlink(missing_ok=True)

    def prune(self, keep: int, also: frozenset[int] = frozenset()) -> None:
        """Delete all but the newest `keep` and the steps in `also`."""
        for step in self.steps()[: -max(keep, 1)]:
            if step not in also:
                shutil.rmtree(self.path(step))


def state_of(manifest: Manifest, files: Mapping[str, bytes]) -> TrainState:
    """The training state of a checkpoint."""
    state = torch.load(io.BytesIO(files[STATE_FILE]), weights_only=True)
    weights = weights_of(files)
    return TrainState(
        manifest.step, weights, state["optimizer"], state["scheduler"], state["rng"], {manifest.step: weights}
    )


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
