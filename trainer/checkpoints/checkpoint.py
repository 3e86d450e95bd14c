"""Checkpoints on disk: each is there completely or not at all.

    <checkpoints>/<project>/<branch>/<model>/step-00000012/
        adapter_config.json  adapter_model.safetensors     PEFT's format: what vLLM loads
        state.pt                                           optimizer, unrounded weights
        manifest.json                                      its event on the log, and the settings it was trained with
    .../<model>/best.json                                  the step with the best validation reward
    .../<model>/log                                        identifies the log that these checkpoints were published on
    .../<model>/attempts.json                              computations that began and did not end

A checkpoint is written into a folder with a temporary name. Every file is fsynced, the manifest is written last,
and a rename gives the folder its name. A checkpoint that is deleted gets a temporary name first. Folders with a
temporary name are left by crashes and are deleted at start.

Errors: `CheckpointError`; the message says what to do.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from journeywork.statistics import Sample
from pipeline import crash
from pipeline.config import Config
from pipeline.events import CheckpointPublished, GroupDiscarded
from pipeline.files import read_json, sync, write_whole
from pipeline.names import subject_token
from pipeline.telemetry.logs import get_logger

logger = get_logger("trainer.checkpoints.checkpoint")

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
MANIFEST_FILE = "manifest.json"
BEST_FILE = "best.json"
ATTEMPTS_FILE = "attempts.json"
LOG_FILE = "log"


class CheckpointError(RuntimeError):
    """A checkpoint that can't be used; the message says which and what to do."""


@contextlib.contextmanager
def passed_over_if_damaged() -> Iterator[None]:
    """Log a warning in place of a `CheckpointError` within the block, which reads the adapter of an earlier step: it is
    needed only to check the logprobs of that version's tokens."""
    try:
        yield
    except CheckpointError as error:
        logger.warning("an earlier adapter is passed over: tokens of its version are not compared", reason=str(error))


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a checkpoint on disk."""

    event: CheckpointPublished
    """The event that is published, before it is signed."""
    config: dict[str, Any]
    """The training settings, for people: `event.config_hash` identifies them."""
    discarded: tuple[GroupDiscarded, ...] = ()
    """Events for trajectories that were left out because they do not fit into memory. They are published after
    `event`."""


def batch_id(parent: str, groups: tuple[str, ...], config_hash: str) -> str:
    """Return the id of a step's batch: a hash of the step's inputs. `parent`: the version before it; `groups`: names of
    its groups."""
    text = "\0".join((parent, config_hash, *groups))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def pack(files: Mapping[str, bytes]) -> bytes:
    """Return the files as one uncompressed tar. The same files give the same bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(files):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(files[name]), 0o644
            tar.addfile(info, io.BytesIO(files[name]))
    return out.getvalue()


def adapter_archive(files: Mapping[str, bytes]) -> bytes:
    """Return the adapter among the files of a checkpoint, as a tar: what the object store holds."""
    return pack({name: files[name] for name in ADAPTER_FILES})


def unpack(data: bytes) -> dict[str, bytes]:
    """Return the files of an adapter tar by name. Raises `CheckpointError` if it is no tar or a compressed one, or if
    it holds anything but plain files at its root."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for info in tar:
                content = tar.extractfile(info) if info.isreg() and "/" not in info.name else None
                if content is None:
                    raise CheckpointError(
                        f"the adapter's archive holds {info.name!r}, which is no plain file: do not use it"
                    )
                files[info.name] = content.read()
    except tarfile.TarError as error:
        raise CheckpointError(f"the adapter's archive can't be read: {error}") from error
    return files


class Best(msgspec.Struct, frozen=True):
    """The checkpoint with the best validation reward: no later one has a mean that is certainly higher."""

    step: int
    rewards: Sample


class Checkpoints:
    """One model's folder of checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, config: Config, model: str) -> Checkpoints:
        """Return the folder of a model on the branch that `config` trains."""
        names = (config.project, config.trainer.branch, model)
        folders = (subject_token(name).replace("/", "%2F") for name in names)
        return cls(config.path(config.trainer.checkpoints, *folders))

    def prepare_folder(self) -> None:
        """Make the folder, and delete what a crash left incomplete. Only the process that writes checkpoints may call
        this: it would delete a checkpoint that another process is writing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".tmp-*"):
            logger.info("removed what a crash left incomplete", path=str(leftover))
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()

    def path(self, step: int) -> Path:
        """The folder of a step, which need not exist."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps that have a folder, ascending."""
        return sorted(int(p.name[5:]) for p in self.folder.glob("step-*") if p.name[5:].isdecimal())

    def write(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        """Write a checkpoint; the folder appears when it is complete. Replaces an earlier one of the same step."""
        target = self.path(manifest.event.step)
        temporary = self.folder / f".tmp-{target.name}-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name, content in files.items():
            write_whole(temporary / name, content, durable=True)
        write_whole(
            temporary / MANIFEST_FILE, msgspec.json.format(msgspec.json.encode(manifest), indent=2), durable=True
        )
        sync(temporary)
        crash.point("trainer.before_rename")
        replaced = self._set_aside(target)
        temporary.rename(target)
        crash.point("trainer.after_rename")
        sync(self.folder)
        shutil.rmtree(replaced)

    def _set_aside(self, folder: Path) -> Path:
        """Rename a step's folder, if there is one, to a temporary name, and return its new path. The caller deletes it;
        `prepare_folder` does after a crash."""
        aside = Path(tempfile.mkdtemp(dir=self.folder, prefix=".tmp-"))
        with contextlib.suppress(FileNotFoundError):
            folder.rename(aside)  # takes the place of the empty folder
        return aside

    def read(self, step: int) -> tuple[Manifest, dict[str, bytes]]:
        """Return the manifest and the files of a step. Raises `CheckpointError` if a file is missing or differs from
        its digest."""
        folder = self.path(step)
        try:
            manifest = msgspec.json.decode((folder / MANIFEST_FILE).read_bytes(), type=Manifest)
            files = {name: (folder / name).read_bytes() for name in manifest.event.files}
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(f"{folder} is no complete checkpoint ({error}): restore or delete it") from error
        for name, content in files.items():
            if hashlib.sha256(content).hexdigest() != manifest.event.files[name]:
                raise CheckpointError(
                    f"{folder / name} does not match its SHA-256 in the manifest: restore or delete the folder"
                )
        return manifest, files

    def best(self) -> Best | None:
        """The checkpoint with the best validation reward; `None` until one was validated. Raises `ConfigError` if its
        file is damaged."""
        try:
            return read_json(
                self.folder / BEST_FILE, Best, "delete it; the next checkpoint that is validated is the best"
            )
        except FileNotFoundError:
            return None

    def set_best(self, best: Best) -> None:
        """Store which checkpoint has the best validation reward."""
        write_whole(self.folder / BEST_FILE, msgspec.json.encode(best), durable=True)

    def log_id(self) -> str:
        """The identity of the log on which the checkpoints were published; empty before the first start on it, or where
        an operator deleted the file to use another log."""
        path = self.folder / LOG_FILE
        return path.read_text("utf-8").strip() if path.exists() else ""

    def set_log_id(self, identity: str) -> None:
        """Store the identity of the log on which the checkpoints are published."""
        write_whole(self.folder / LOG_FILE, identity.encode(), durable=True)

    def _attempts(self) -> dict[str, int]:
        """Return for each batch how many computations of it began and did not end."""
        try:
            return msgspec.json.decode((self.folder / ATTEMPTS_FILE).read_bytes(), type=dict[str, int])
        except (FileNotFoundError, msgspec.DecodeError):  # it is not synced: a power cut may empty it
            return {}

    def count_attempt(self, batch: str) -> int:
        """Store that a computation of `batch` begins. Returns how many began and did not end, with this one."""
        attempts = self._attempts()
        attempts[batch] = attempts.get(batch, 0) + 1
        write_whole(self.folder / ATTEMPTS_FILE, msgspec.json.encode(attempts))
        return attempts[batch]

    def clear_attempts(self, batch: str = "") -> None:
        """Store that a computation of `batch` has ended; without a name, of all batches."""
        left = {name: n for name, n in self._attempts().items() if batch and name != batch}
        if left:
            write_whole(self.folder / ATTEMPTS_FILE, msgspec.json.encode(left))
        else:
            (self.folder / ATTEMPTS_FILE).unlink(missing_ok=True)

    def prune(self, keep: int, also: frozenset[int] = frozenset()) -> None:
        """Delete all checkpoints but those of the newest `keep` steps and of the steps in `also`."""
        pruned = [step for step in self.steps()[: -max(keep, 1)] if step not in also]
        asides = [self._set_aside(self.path(step)) for step in pruned]
        sync(self.folder)  # after a power cut no folder has a step's name and half of its files
        for aside in asides:
            shutil.rmtree(aside)
