"""The store's files in a folder on this machine's disk."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import crash
from pipeline.files import sync
from store.target import DAMAGED, SUFFIX, DamagedFileError, Target, locked_file, write_parquet

if TYPE_CHECKING:
    import duckdb  # the writer does not need it

_TEMPORARY = ".tmp-"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class LocalTarget(Target):
    """A folder on this machine's disk."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def __str__(self) -> str:
        return str(self.root)

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

    def url(self, tag: str, name: str) -> str:
        return str(self.path(tag, name))

    def attach(self, connection: duckdb.DuckDBPyConnection) -> None:
        """DuckDB reads local files by itself."""

    def names(self, tag: str) -> list[str]:
        try:
            entries = [p.name for p in (self.root / tag).iterdir()]
        except FileNotFoundError:
            return []
        return sorted(n for n in entries if n.endswith(SUFFIX) and not n.startswith("."))

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

    def _open(self, tag: str, name: str) -> pq.ParquetFile:
        path = self.path(tag, name)
        try:
            return pq.ParquetFile(str(path), memory_map=False)
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise DamagedFileError(str(path), str(error)) from error

    def size(self, tag: str, name: str) -> int:
        return self.path(tag, name).stat().st_size

    def modified(self, tag: str, name: str) -> float:
        return self.path(tag, name).stat().st_mtime

    def remove(self, tag: str, name: str) -> None:
        self.path(tag, name).unlink(missing_ok=True)

    def set_aside(self, tag: str, name: str) -> str:
        aside = self.path(tag, name + DAMAGED)
        self.path(tag, name).replace(aside)
        return str(aside)
