"""What the store needs of a place for its files, and its errors.

`store.local` and `store.objects` implement it; `store.location` opens the one that the settings name."""

from __future__ import annotations

import contextlib
import fcntl
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from store import columns

if TYPE_CHECKING:
    import duckdb  # the writer does not need it

SUFFIX = ".parquet"
DAMAGED = ".damaged"
"""Appended to the name of a file that is set aside."""


class StoreError(Exception):
    """Base of the store's errors."""


class StoreBusyError(StoreError):
    """Another store process writes to the same place."""


class DamagedFileError(StoreError):
    """A file that is no complete Parquet file; `path` names it."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"{path} is damaged ({why}): restart the store, which sets the file aside and reads its events from "
            "the log again"
        )
        self.path = path


class Target(ABC):
    """A place with one folder per event tag. A file is written once, completely, and never changed."""

    def __init__(self, files: fs.FileSystem, root: str, scheme: str = "") -> None:
        """`root` is the place's folder in `files`; `scheme` precedes it in messages."""
        self._fs, self._root, self._scheme = files, root, scheme

    def __str__(self) -> str:
        return self._scheme + self._root

    def exists(self) -> bool:
        """Whether anything was ever written here."""
        return bool(self._fs.get_file_info(fs.FileSelector(self._root, allow_not_found=True)))

    @abstractmethod
    def locked(self) -> AbstractContextManager[None]:
        """Holds the lock of the only writer. Removes what a dead writer left incomplete. Raises `StoreBusyError`
        where another process holds the lock."""

    def url(self, tag: str, name: str) -> str:
        """The path or URL by which DuckDB reads the file, after `attach`."""
        return self._key(tag, name)

    def attach(self, connection: duckdb.DuckDBPyConnection) -> None:  # noqa: B027 - local files need nothing
        """Let `connection` read the URLs. Safe to repeat."""

    def names(self, tag: str) -> list[str]:
        """Names of the tag's finished files, sorted."""
        return sorted(info.base_name for info in self._files(tag))

    @abstractmethod
    def write(self, tag: str, name: str, tables: Iterable[pa.Table], metadata: dict[str, str]) -> None:
        """Write a file with one row group per table. It appears complete and durable, or not at all. Raises
        `OSError`."""

    @abstractmethod
    def is_retryable(self, error: OSError) -> bool:
        """Whether a write that failed with `error` can succeed later without a restart of the store."""

    @abstractmethod
    def check(self, tag: str, name: str) -> None:
        """Raise `DamagedFileError` where the file does not begin and end as a Parquet file does."""

    def size(self, tag: str, name: str) -> int:
        """Size of the file in bytes."""
        return int(self._info(tag, name).size)

    def modified(self, tag: str, name: str) -> float:
        """When the file was written, seconds since the epoch."""
        return float(self._info(tag, name).mtime.timestamp())

    def remove(self, tag: str, name: str) -> None:
        """Delete a file. Safe to repeat."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.delete_file(self._key(tag, name))

    def set_aside(self, tag: str, name: str) -> str:
        """Rename a damaged file so that no reader lists it; returns the new name."""
        key = self._key(tag, name)
        self._fs.move(key, key + DAMAGED)
        return f"{self._scheme}{key}{DAMAGED}"

    def _key(self, tag: str, name: str) -> str:
        return f"{self._root}/{tag}/{name}"

    def _files(self, tag: str) -> list[fs.FileInfo]:
        found = self._fs.get_file_info(fs.FileSelector(f"{self._root}/{tag}", allow_not_found=True))
        return [i for i in found if i.base_name.endswith(SUFFIX) and not i.base_name.startswith(".")]

    def _info(self, tag: str, name: str) -> fs.FileInfo:
        info = self._fs.get_file_info(self._key(tag, name))
        if info.type == fs.FileType.NotFound:
            raise FileNotFoundError(self.url(tag, name))
        return info

    def _open(self, tag: str, name: str) -> pq.ParquetFile:
        """Open a file. Raises `FileNotFoundError`, `DamagedFileError`."""
        try:
            return pq.ParquetFile(self._fs.open_input_file(self._key(tag, name)))
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError) as error:
            if not self._is_damage(error):
                raise
            raise DamagedFileError(self.url(tag, name), str(error)) from error

    def _is_damage(self, error: Exception) -> bool:
        """Whether a failed read means that the file is damaged."""
        return True

    def metadata(self, tag: str, name: str) -> dict[str, str]:
        """The metadata that `write` was given. Raises `DamagedFileError`."""
        return {k.decode(): v.decode() for k, v in (self._open(tag, name).metadata.metadata or {}).items()}

    def read(self, tag: str, name: str, names: list[str] | None = None) -> pa.Table:
        """The file's table, or the columns `names` of it. Raises `DamagedFileError`."""
        try:
            return self._open(tag, name).read(columns=names)
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise DamagedFileError(self.url(tag, name), str(error)) from error

    def column_names(self, tag: str, name: str) -> list[str]:
        """Names of the file's columns."""
        return list(self._open(tag, name).schema_arrow.names)

    def newest(self, tag: str, name: str) -> int:
        """The highest stream time in the file in microseconds, from its statistics."""
        footer = self._open(tag, name).metadata
        at = [footer.row_group(0).column(i).path_in_schema for i in range(footer.num_columns)].index("log_at")
        groups = (footer.row_group(i).column(at).statistics for i in range(footer.num_row_groups))
        return max(int(g.max.replace(tzinfo=UTC).timestamp() * 1e6) for g in groups)


@contextlib.contextmanager
def locked_file(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path`. Raises `StoreBusyError`, which names `what`, where another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreBusyError(f"another store process writes to {what}: stop it first") from error
        yield


def write_parquet(where: Any, tag: str, tables: Iterable[pa.Table], metadata: dict[str, str]) -> None:
    """Write tables to a path or an Arrow stream: zstd at level 1, packed numbers byte-stream-split, short text
    dictionary-encoded."""
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
