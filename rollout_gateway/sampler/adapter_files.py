"""Downloads adapters from the log's object store to this machine's disk, where the inference servers read them, and
deletes those that no server has loaded. `rollout_gateway.sampler.controller` asks for the folder of an adapter before
it has a server load it. An adapter is trusted by its SHA-256, which the trainer signed with the checkpoint's event."""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio

from pipeline import crash
from pipeline.events import CheckpointPublished
from pipeline.log.broker import Broker, HistoryGoneError
from pipeline.names import subject_token
from pipeline.streams import ADAPTERS_BUCKET
from pipeline.telemetry.logs import get_logger

logger = get_logger("rollout_gateway.sampler.adapter_files")

_ADAPTER = re.compile(r"(?P<name>.+@[0-9]+-[0-9a-f]{16})(\.part)?|unused-.+\.deleted")
"""Names of the folders of this module: of an adapter, complete or not, or of adapters that are being deleted. What a
user keeps beside them is not deleted."""


class AdapterError(Exception):
    """An adapter was not loaded, or failed a check."""

    def __init__(self, message: str, *, permanent: bool) -> None:
        """`permanent`: whether another attempt would fail too."""
        super().__init__(message)
        self.permanent = permanent


class AdapterFiles:
    """The adapters in a folder, each in a subfolder. Its name contains the version and the first 16 digits of the
    adapter's SHA-256."""

    def __init__(self, folder: Path, broker: Broker) -> None:
        self.folder, self._broker = folder.resolve(), broker
        self._locks: dict[str, asyncio.Lock] = {}
        self._inherited = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        """Names of the folders that were there at the start: an earlier process of the sampler agent left them, and an
        inference server may still have loaded them."""

    def path(self, version: str, sha256: str) -> Path:
        """Return the folder of an adapter, whether or not it exists."""
        return self.folder / f"{subject_token(version).replace('/', '%2F')}-{sha256[:16]}"

    def is_published(self, event: CheckpointPublished, path: str) -> bool:
        """Return whether `path`, from which a server has loaded an adapter, belongs to the published adapter."""
        return Path(path).name == self.path(event.version, event.adapter_sha256).name

    async def ensure(self, version: str, name: str, sha256: str, files: Mapping[str, str]) -> Path:
        """Return the folder of an adapter. Download and unpack the adapter if the folder is missing or was changed.

        `name`: the object's name in the object store; `sha256`: of the object; `files`: the SHA-256 of each file by
        name. Raises `AdapterError` if the object is gone or its SHA-256 is another one, and `BrokerError`."""
        path = self.path(version, sha256)
        async with self._locks.setdefault(version, asyncio.Lock()):
            if path.is_dir():
                if await anyio.to_thread.run_sync(_unchanged, path, files):
                    return path
                logger.error("adapter folder was changed; downloading the adapter again", version=version)
                await anyio.to_thread.run_sync(shutil.rmtree, path)
            try:
                data = await self._broker.get_object(ADAPTERS_BUCKET, name)
            except HistoryGoneError as error:
                raise AdapterError(str(error), permanent=True) from error
            digest = hashlib.sha256(data).hexdigest()
            if digest != sha256:
                why = f"object {name} has SHA-256 {digest}; its checkpoint event says {sha256}"
                raise AdapterError(why, permanent=True)
            await anyio.to_thread.run_sync(_unpack, data, path)
            return path

    async def delete_unused(self, used: Iterable[str], *, inherited: bool) -> None:
        """Delete the adapters whose folders are not in `used`. Those of earlier agents are deleted only with
        `inherited`: a server that this agent has not reached yet may have loaded them."""
        names = {Path(path).name for path in used}
        unused = [
            path
            for path in (self.folder.iterdir() if self.folder.is_dir() else ())
            if (adapter := _ADAPTER.fullmatch(path.name)) is not None
            and adapter["name"] not in names
            and (inherited or path.name not in self._inherited)
        ]
        if not unused:
            return
        try:
            # Moved at once, so that `ensure` finds an adapter whole or not at all.
            gone = Path(tempfile.mkdtemp(dir=self.folder, prefix="unused-", suffix=".deleted"))
            for path in unused:
                with suppress(FileNotFoundError):  # another deletion was first
                    path.rename(gone / path.name)
        except OSError as error:
            logger.warning("adapters that no server uses were not deleted", error=str(error))
            return
        await anyio.to_thread.run_sync(partial(shutil.rmtree, gone, ignore_errors=True))


def _unchanged(folder: Path, files: Mapping[str, str]) -> bool:
    """Return whether the folder holds exactly the files of the published adapter. `files`: as in `ensure`."""
    present = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}
    # The event lists the training state too, which is not in the archive.
    return present == {n: digest for n, digest in files.items() if n.startswith("adapter_")}


def _unpack(data: bytes, path: Path) -> None:
    """Unpack an adapter's archive into the folder `path`, which appears whole or not at all. Raises
    `tarfile.TarError`."""
    temporary = path.with_name(path.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    # `r:` refuses a compressed archive, which would be unpacked without a limit.
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        archive.extractall(temporary, filter="data")
    for file in temporary.rglob("*"):  # the modes in the archive may let every user read
        file.chmod(0o700 if file.is_dir() else 0o600)
    crash.point("sampler.before_rename")
    temporary.rename(path)
    crash.point("sampler.after_rename")
