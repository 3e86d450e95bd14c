"""Adapters on this machine's disk, where the inference servers read them."""

from __future__ import annotations

import asyncio
import hashlib
import io
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path

import anyio

from pipeline import crash
from pipeline.events import CheckpointPublished
from pipeline.log.broker import Broker, HistoryGoneError
from pipeline.names import subject_token
from pipeline.streams import ADAPTERS_BUCKET
from pipeline.telemetry.logs import get_logger

log = get_logger("rollout_gateway.sampler.adapter_files")


class AdapterError(Exception):
    """An adapter was not loaded, or failed a check."""

    def __init__(self, message: str, *, lasting: bool) -> None:
        """`lasting`: whether another attempt would fail too."""
        super().__init__(message)
        self.lasting = lasting


class AdapterFiles:
    """Downloads adapters into a folder. The name of an adapter's folder holds its version and the start of its
    SHA-256."""

    def __init__(self, folder: Path, broker: Broker) -> None:
        self.folder, self._broker = folder.resolve(), broker
        self._locks: dict[str, asyncio.Lock] = {}

    def path(self, version: str, sha256: str) -> Path:
        """Return the folder of an adapter, whether or not it exists."""
        return self.folder / f"{subject_token(version).replace('/', '%2F')}-{sha256[:16]}"

    def is_published(self, event: CheckpointPublished, path: str) -> bool:
        """Return whether `path`, from which a server has loaded an adapter, belongs to the published adapter."""
        return Path(path).name == self.path(event.version, event.adapter_sha256).name

    async def ensure(
        self, version: str, name: str, sha256: str, files: Mapping[str, str] | None = None
    ) -> Path:
        """Return the folder of an adapter. The adapter is downloaded and unpacked if the folder is missing or changed.

        `name` is the name of the object in the object store, `files` the SHA-256 of each of its files. Raises
        `AdapterError` if the object is gone or has another SHA-256 than the published one, and `BrokerError`."""
        path = self.path(version, sha256)
        async with self._locks.setdefault(version, asyncio.Lock()):
            if path.is_dir():
                if await anyio.to_thread.run_sync(_unchanged, path, files or {}):
                    return path
                log.error("adapter folder was changed; it is unpacked again", version=version)
                await anyio.to_thread.run_sync(shutil.rmtree, path)
            try:
                data = await self._broker.get_object(ADAPTERS_BUCKET, name)
            except HistoryGoneError as error:
                raise AdapterError(str(error), lasting=True) from error
            digest = hashlib.sha256(data).hexdigest()
            if digest != sha256:
                raise AdapterError(f"{name} has sha256 {digest}, its checkpoint says {sha256}", lasting=True)
            await anyio.to_thread.run_sync(_unpack, data, path)
            return path

    def delete(self, path: str) -> None:
        """Delete the files of an adapter. A path outside of this folder is ignored."""
        if Path(path).parent == self.folder:
            shutil.rmtree(path, ignore_errors=True)


def _unchanged(folder: Path, files: Mapping[str, str]) -> bool:
    """Return whether the folder holds exactly the files of the published adapter. `files`: as in `ensure`."""
    if not files:  # an event of a version that did not list them
        return True
    held = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}
    # The event lists the training state too, which is not in the archive.
    return held == {n: digest for n, digest in files.items() if n.startswith("adapter_")}


def _unpack(data: bytes, path: Path) -> None:
    temporary = path.with_name(path.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(temporary, filter="data")
    for file in temporary.rglob("*"):  # the archive's own modes let everyone read
        file.chmod(0o700 if file.is_dir() else 0o600)
    crash.point("sampler.before_rename")
    temporary.rename(path)
    crash.point("sampler.after_rename")
