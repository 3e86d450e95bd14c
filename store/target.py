"""Where the files go: each is written whole or not at all, and is durable before its name exists."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import crash
from pipeline.config import Config
from store import columns

if TYPE_CHECKING:
    import duckdb  # the writer does not need it

SUFFIX = ".parquet"
DAMAGED = ".damaged"
OBJECTS = "s3://"
"""How `store.dir` begins where it names object storage."""
_TEMPORARY = ".tmp-"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class StoreError(Exception):
    """Root of what the store raises."""


class StoreBusyError(StoreError):
    """Another process writes to this folder."""


class DamagedFileError(StoreError):
    """A file that is no whole Parquet file; `path` names it."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"{path} is damaged ({why}): restart the store, which sets it aside and fetches its events from the log again"
        )
        self.path = path


class Target(ABC):
    """A place with one folder per event tag. Files are immutable: each name is written once, whole, and never changed."""

    @abstractmethod
    def __str__(self) -> str: ...

    @abstractmethod
    def exists(self) -> bool:
        """Whether anything was ever written here."""

    @abstractmethod
    def locked(self) -> AbstractContextManager[None]:
        """The only writer, while it lasts; raises `StoreBusyError` where there is one. Leftovers of a writer that died go
        first."""

    @abstractmethod
    def url(self, tag: str, name: str) -> str:
        """What DuckDB reads the file by, once `attach` was called."""

    @abstractmethod
    def attach(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Let `connection` read the urls. Safe to repeat."""

    @abstractmethod
    def names(self, tag: str) -> list[str]:
        """Names of the tag's finished files, sorted."""

    @abstractmethod
    def write(self, tag: str, name: str, tables: Iterable[pa.Table], metadata: dict[str, str]) -> None:
        """The file appears whole and durable, or not at all; one row group a table. Raises `OSError`."""

    @abstractmethod
    def heals(self, error: OSError) -> bool:
        """Whether a failed write may succeed later without anyone's doing more than mending its cause."""

    @abstractmethod
    def check(self, tag: str, name: str) -> None:
        """Raises `DamagedFileError` where the file does not begin and end as a Parquet file does."""

    @abstractmethod
    def size(self, tag: str, name: str) -> int:
        """Bytes."""

    @abstractmethod
    def modified(self, tag: str, name: str) -> float:
        """When the file was written, seconds since the epoch."""

    @abstractmethod
    def remove(self, tag: str, name: str) -> None:
        """Safe to repeat."""

    @abstractmethod
    def set_aside(self, tag: str, name: str) -> str:
        """Take a damaged file out of the way, under a name that no reader lists; returns that name."""

    @abstractmethod
    def _open(self, tag: str, name: str) -> pq.ParquetFile:
        """Raises `FileNotFoundError`, `DamagedFileError`."""

    def metadata(self, tag: str, name: str) -> dict[str, str]:
        """What `write` was given beside the table; raises `DamagedFileError`."""
        return {k.decode(): v.decode() for k, v in (self._open(tag, name).metadata.metadata or {}).items()}

    def read(self, tag: str, name: str, names: list[str] | None = None) -> pa.Table:
        """The file's table, or these columns of it; raises `DamagedFileError`."""
        try:
            return self._open(tag, name).read(columns=names)
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise DamagedFileError(self.url(tag, name), str(error)) from error

    def column_names(self, tag: str, name: str) -> list[str]:
        return list(self._open(tag, name).schema_arrow.names)

    def newest(self, tag: str, name: str) -> int:
        """The highest stream time in the file, microseconds, from its statistics."""
        footer = self._open(tag, name).metadata
        at = [footer.row_group(0).column(i).path_in_schema for i in range(footer.num_columns)].index("log_at")
        groups = (footer.row_group(i).column(at).statistics for i in range(footer.num_row_groups))
        return max(int(g.max.replace(tzinfo=UTC).timestamp() * 1e6) for g in groups)


@contextlib.contextmanager
def locked_file(path: Path, what: str) -> Iterator[None]:
    """Hold the lock of `path`; raises `StoreBusyError` where another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreBusyError(f"another store process writes to {what}: stop it first") from error
        yield


class LocalTarget(Target):
    """A folder of this machine."""

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
        """DuckDB reads this machine's files by itself."""

    def names(self, tag: str) -> list[str]:
        try:
            entries = [p.name for p in (self.root / tag).iterdir()]
        except FileNotFoundError:
            return []
        return sorted(n for n in entries if n.endswith(SUFFIX) and not n.startswith("."))

    def write(self, tag: str, name: str, tables: Iterable[pa.Table], metadata: dict[str, str]) -> None:
        """Temporary name, fsync, rename, fsync of the folder. Leaves nothing behind where it fails."""
        folder = self.root / tag
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / (_TEMPORARY + name)
        try:
            write_parquet(str(temporary), tag, tables, metadata)
            _fsync(temporary)
            crash.point("store.before_rename")
            temporary.replace(folder / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        crash.point("store.after_rename")
        _fsync(folder)

    def heals(self, error: OSError) -> bool:
        """A full disk may get room again."""
        return error.errno in _FULL

    def check(self, tag: str, name: str) -> None:
        """A few microseconds."""
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


def open_target(config: Config) -> Target:
    """Where `store.dir` says. Raises `ConfigError`."""
    if config.store.dir.startswith(OBJECTS):
        from store.objects import ObjectTarget

        return ObjectTarget(config)
    return LocalTarget(config.path(config.store.dir))


def write_parquet(where: Any, tag: str, tables: Iterable[pa.Table], metadata: dict[str, str]) -> None:
    """To a path or an Arrow stream; zstd at level 1; packed numbers are byte-stream-split, short text is dictionary-encoded."""
    split, dictionary = columns.split_columns(tag)
    with pq.ParquetWriter(
        where,
        columns.arrow_schema(tag),
        compression="zstd",
        compression_level=1,
        use_dictionary=dictionary,
        column_encoding=dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        store_schema=False,
    ) as writer:
        for table in tables:
            writer.write_table(table)
        writer.add_key_value_metadata(metadata)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
