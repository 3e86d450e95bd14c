"""Files that appear whole or not at all, and stay after a power cut.

A file is written under a temporary name, synced, and then renamed or linked to its own name. A name is on the disk only
after its folder has been synced, too."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from pipeline.errors import ConfigError

T = TypeVar("T")


def read_json(path: Path, kind: type[T], remedy: str) -> T:
    """Return the content of a JSON file that a program here wrote. Raises `FileNotFoundError`, and for a damaged file
    `ConfigError`, which ends with `remedy`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is damaged ({error}): {remedy}") from error


def write_whole(path: Path, content: bytes | str, *, durable: bool = False, mode: int = 0o666) -> None:
    """Write `content` to `path`: a reader, or a crash, finds the old content or the new one, never a part of it.

    With `durable` the content, and folders that were missing, are on the disk when the function returns. `mode` is
    reduced by the process's umask."""
    _make_folder(path.parent, durable)
    with _temporary(path) as temporary:
        _write(temporary, content.encode() if isinstance(content, str) else content, mode)
        if durable:
            sync(temporary)
        temporary.replace(path)
    if durable:
        sync(path.parent)


def try_lock(file: int | IO[Any], lock_type: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file, or its descriptor, unless another process has it locked. Returns whether this process has the
    lock, which ends when the file is closed or the process ends. `lock_type`: `fcntl.LOCK_EX` or `LOCK_SH`."""
    try:
        fcntl.flock(file, lock_type | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_once(path: Path, make: Callable[[], bytes]) -> None:
    """Write the result of `make`, a secret, to `path` with mode 0600, unless the file exists. Of several processes at
    once one writes; afterwards the file is on the disk, whole.

    Raises `ConfigError` if the file exists and holds nothing but white space, as after `touch` or from an empty mount:
    the secret would be the empty one, which everyone knows."""
    if path.exists():
        # A file that this process may not read, or whose folder it may not list, was put there by an operator.
        with suppress(PermissionError):
            if not path.read_bytes().strip():
                raise ConfigError(
                    f"the secret {path} is empty: delete it, and it is made anew, or write the secret to it"
                )
            # Another process may have linked it just now, and not have synced the folder yet.
            sync(path.parent)
        return
    _make_folder(path.parent, True, mode=0o700)
    # A link, unlike a rename, does not replace what another process wrote first.
    with _temporary(path) as temporary:
        _write(temporary, make(), 0o600)
        sync(temporary)
        with suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
    sync(path.parent)


def _make_folder(folder: Path, durable: bool, mode: int = 0o777) -> None:
    """Make `folder`, and those above it, where they are missing. `mode` is that of `folder` only."""
    if folder.is_dir():
        return
    _make_folder(folder.parent, durable)
    folder.mkdir(mode=mode, exist_ok=True)
    if durable:
        sync(folder.parent)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Make the file `path`, which must not exist, with `content`. It has its `mode` before it has any content."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Give an unused path beside `path`; the block makes the file. If the block fails, the file is deleted; if it
    succeeds, it has renamed or removed the file itself."""
    temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
    try:
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Return when the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
