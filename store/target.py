"""Where the files go: each is written whole or not at all, and is durable before its name exists."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from datetime import UTC
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import crash
from store import columns

SUFFIX = ".parquet"
_TEMPORARY = ".tmp-"


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


class LocalTarget:
    """A folder with one folder per event tag."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def __str__(self) -> str:
        return str(self.root)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """The only writer of the folder, while it lasts; raises `StoreBusyError` where there is one. Leftovers of a
        writer that died go first."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StoreBusyError(f"another store process writes to {self.root}: stop it first") from error
            for leftover in self.root.glob(f"*/{_TEMPORARY}*"):
                leftover.unlink()
            yield

    def path(self, tag: str, name: str) -> Path:
        return self.root / tag / name

    def names(self, tag: str) -> list[str]:
        """Names of the tag's finished files, sorted."""
        try:
            entries = [p.name for p in (self.root / tag).iterdir()]
        except FileNotFoundError:
            return []
        return sorted(n for n in entries if n.endswith(SUFFIX) and not n.startswith("."))

    def write(self, tag: str, name: str, tables: Iterable[pa.Table], metadata: dict[str, str]) -> None:
        """Temporary name, fsync, rename, fsync of the folder; one row group a table. Raises `OSError`, and leaves nothing
        behind then."""
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

    def check(self, tag: str, name: str) -> None:
        """Raises `DamagedFileError` where the file does not begin and end as a Parquet file does (a few microseconds)."""
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

    def metadata(self, tag: str, name: str) -> dict[str, str]:
        """What `write` was given beside the table; raises `DamagedFileError`."""
        return {k.decode(): v.decode() for k, v in (self._open(tag, name).metadata.metadata or {}).items()}

    def read(self, tag: str, name: str, names: list[str] | None = None) -> pa.Table:
        """The file's table, or these columns of it; raises `DamagedFileError`."""
        path = self.path(tag, name)
        try:
            return self._open(tag, name).read(columns=names)
        except (pa.ArrowException, OSError) as error:
            raise DamagedFileError(str(path), str(error)) from error

    def _open(self, tag: str, name: str) -> pq.ParquetFile:
        path = self.path(tag, name)
        try:
            return pq.ParquetFile(str(path), memory_map=False)
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise DamagedFileError(str(path), str(error)) from error

    def size(self, tag: str, name: str) -> int:
        """Bytes on disk."""
        return self.path(tag, name).stat().st_size

    def modified(self, tag: str, name: str) -> float:
        """When the file was written, seconds since the epoch."""
        return self.path(tag, name).stat().st_mtime

    def column_names(self, tag: str, name: str) -> list[str]:
        return list(self._open(tag, name).schema_arrow.names)

    def newest(self, tag: str, name: str) -> int:
        """The highest stream time in the file, microseconds, from its statistics."""
        footer = self._open(tag, name).metadata
        at = [footer.row_group(0).column(i).path_in_schema for i in range(footer.num_columns)].index("log_at")
        groups = (footer.row_group(i).column(at).statistics for i in range(footer.num_row_groups))
        return max(int(g.max.replace(tzinfo=UTC).timestamp() * 1e6) for g in groups)

    def remove(self, tag: str, name: str) -> None:
        self.path(tag, name).unlink(missing_ok=True)

    def set_aside(self, tag: str, name: str) -> str:
        """Take a damaged file out of the way, under a name that no reader lists; returns that name."""
        aside = self.path(tag, name + ".damaged")
        self.path(tag, name).replace(aside)
        return str(aside)


def write_parquet(where: str, tag: str, tables: Iterable[pa.Table], metadata: dict[str, str]) -> None:
    """zstd at level 1; packed numbers are byte-stream-split, short text is dictionary-encoded."""
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
