"""The store's files in a folder on this machine's disk."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from pipeline import crash
from pipeline.files import sync
from store.target import DamagedFileError, Target, locked_file, write_parquet

_TEMPORARY = ".tmp-"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class LocalTarget(Target):
    """A folder on this machine's disk."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        super().__init__(fs.LocalFileSystem(), str(root))

    def exists(self) -> bool:
        return self.root.is_dir()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        with locked_file(self.root / ".lock", str(self)):
            for leftover in self.root.glob(f"*/{_TEMPORARY}*"):
                leftover.unlink()
            yield

    def path(self, tag: str, name: str) -> Path:
        return self.root / tag / name

    def write(self, tag: str, name: str, tables: Iterable[pa.Table], metadata: dict[str, str]) -> None:
        """Temporary name, fsync, rename, fsync of the folder. A failed write leaves nothing behind."""
        folder = self.root / tag
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / (_TEMPORARY + name)
        try:
            write_parquet(str(temporary), tag, tables, metadata)
            sync(temporary)
            crash.point("store.before_rename")
            temporary.replace(folder / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        crash.point("store.after_rename")
        sync(folder)

    def is_retryable(self, error: OSError) -> bool:
        """A full disk can get room again."""
        return error.errno in _FULL

    def check(self, tag: str, name: str) -> None:
        """Reads 12 bytes, so a check takes microseconds."""
        path = self.path(tag, name)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 12:
                raise DamagedFileError(str(path), f"{size} bytes")
            if file.read(4) != b"PAR1":
                raise DamagedFileError(str(path), "its first bytes are not Parquet's")
            file.seek(-8, os.SEEK_END)
            end = file.read(8)
            if end[4:] != b"PAR1" or int.from_bytes(end[:4], "little") > size - 12:
                raise DamagedFileError(str(path), "its end is missing")
