"""Storage of the lake: a local folder, or a prefix in S3-compatible object storage. Also the store's errors.

delta-rs commits to both. This module adds what delta-rs does not do: on a local disk it calls fsync; for object storage
it gives DuckDB a file system, because DuckDB's own S3 support is an extension that it downloads at run time.

`store.dir` is a folder, or `s3://<bucket>/<prefix>`. Credentials come from the AWS_* environment variables only.
"""

from __future__ import annotations

import errno
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.exceptions import CommitFailedError
from pyarrow import fs

from pipeline.config import Config, ConfigError
from pipeline.files import sync, write_whole
from pipeline.versions.lake_files import REQUEST_S, S3, open_s3
from store.lake import columns

if TYPE_CHECKING:
    import duckdb  # not imported at run time: the writer does not need it

LOG = "_delta_log"
"""Folder of a table's journal."""
ASIDE = "damaged"
"""Folder for damaged files, beside the tables."""
_DUCKDB_S3 = "journeywork-s3"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNREADABLE = (pa.ArrowException, OSError, ValueError)
"""Errors of reading a file. A damaged name of a column is a `ValueError`: it is not UTF-8."""

TRANSIENT = tuple(os.strerror(number) for number in (errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ENOMEM))
"""Texts in DuckDB's errors that tell of no damage: the file could not be opened for a reason that can pass."""


class StoreError(Exception):
    """Base of the store's errors."""


class DamagedFileError(StoreError):
    """A file of a table is damaged or, where a table needs it, missing. `path` names it."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"{path} is damaged ({why}): restore it from a backup. Without one, stop the store, move the file "
            "away, and remove it from its table as docs/store.md says under Faults"
        )
        self.path = path


class Storage(ABC):
    """One folder per event tag, each a Delta table."""

    options: dict[str, str]
    """Storage options for delta-rs."""
    scheme = ""
    """Before the root, in addresses for delta-rs."""
    needs_sync = False
    """Whether a power cut may lose writes until `make_durable` has returned."""

    def __init__(self, files: fs.FileSystem, root: str) -> None:
        """`root`: path of the lake in the file system `files`."""
        self.files, self.root = files, root

    def __str__(self) -> str:
        return self.uri("").rstrip("/")

    def uri(self, tag: str) -> str:
        """Return the address of a tag's table for delta-rs."""
        return f"{self.scheme}{self.root}/{tag}"

    def url(self, tag: str, name: str) -> str:
        """Return the path or URL by which DuckDB reads a file after `attach`."""
        return self.key(tag, name)

    def attach(self, connection: duckdb.DuckDBPyConnection) -> None:  # noqa: B027 - local files need nothing
        """Enable `connection` to read the URLs that `url` returns. May be called again."""

    def key(self, tag: str, name: str) -> str:
        """Return the path of a file in the file system `files`."""
        return f"{self.root}/{tag}/{name}"

    def exists(self) -> bool:
        """Return whether anything was ever written here."""
        return bool(self.files.get_file_info(fs.FileSelector(self.root, allow_not_found=True)))

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder of the lake, sorted. Raises `OSError`."""
        return sorted(info.base_name for info in self.files.get_file_info(fs.FileSelector(f"{self.root}/{folder}")))

    def read(self, tag: str, name: str, only: list[str] | None = None) -> pa.Table:
        """Return a file's rows, with all columns or `only` these, without those that the file lacks.

        Raises `FileNotFoundError`, `DamagedFileError`, and other errors of the system as they are."""
        try:
            with self.files.open_input_file(self.key(tag, name)) as file:
                return pq.ParquetFile(file).read(columns=only)
        except FileNotFoundError:
            raise
        except _UNREADABLE as error:
            if not self._is_damage(error, self.key(tag, name)):
                raise
            raise DamagedFileError(f"{self.uri(tag)}/{name}", str(error)) from error

    def _is_damage(self, error: Exception, key: str) -> bool:
        """Return whether the file at `key` is damaged, whose reading raised `error`. Arrow's own errors about its
        content have no number of the operating system. One of memory tells nothing of the file."""
        if isinstance(error, MemoryError):
            return False
        return not isinstance(error, OSError) or error.errno in (None, errno.EIO)

    def holds(self, folder: str, name: str) -> bool:
        """Return whether there is a file of that name. Raises `OSError`."""
        return bool(self.files.get_file_info(self.key(folder, name)).type != fs.FileType.NotFound)

    @abstractmethod
    def put(self, folder: str, name: str, content: bytes) -> None:
        """Write a file that belongs to no table, durably; it is there whole or not at all. Raises `OSError`."""

    @abstractmethod
    def write(self, tag: str, name: str, tables: Iterable[pa.Table]) -> int:
        """Write a Parquet file with a row group for each table, durably. Return its size in bytes. The file belongs to
        the table only when a commit names it. Raises `OSError`."""

    def make_durable(self, tag: str, names: Iterable[str]) -> None:  # noqa: B027 - an acknowledged upload is durable
        """Make these files of a tag's folder and their directory entries survive a power cut. Missing files are
        skipped."""

    def set_aside(self, tag: str, name: str) -> str:
        """Move a file of a tag's table into the folder `damaged`, and return its path there. `name` is relative to the
        table's folder. Does nothing if the file is missing, so it may be called again. Raises `OSError`."""
        aside = f"{self.root}/{ASIDE}/{tag}-{name.replace('/', '-')}"
        self.files.create_dir(f"{self.root}/{ASIDE}")
        if self.files.get_file_info(self.key(tag, name)).type != fs.FileType.NotFound:
            self.files.move(self.key(tag, name), aside)
        return aside

    @abstractmethod
    def is_retryable(self, error: Exception) -> bool:
        """Return whether a write that failed with `error` can succeed later without a restart of the store."""


class LocalStorage(Storage):
    """A local folder."""

    needs_sync = True

    def __init__(self, root: str | Path) -> None:
        super().__init__(fs.LocalFileSystem(), str(Path(root).absolute()))
        self.options = {}

    def exists(self) -> bool:
        return Path(self.root).is_dir()

    def put(self, folder: str, name: str, content: bytes) -> None:
        path = Path(self.root, folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content, durable=True)

    def write(self, tag: str, name: str, tables: Iterable[pa.Table]) -> int:
        path = Path(self.root, tag, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_parquet(str(path), tag, tables)
            sync(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path.stat().st_size

    def make_durable(self, tag: str, names: Iterable[str]) -> None:
        folder = Path(self.root, tag)
        for name in names:
            if (path := folder / name).exists():
                sync(path)
        for changed in (folder / LOG, folder, folder.parent):
            sync(changed)

    def is_retryable(self, error: Exception) -> bool:
        """Return whether the disk is full or a commit conflicted with other writers. delta-rs reports a full disk in
        the error's text only."""
        full = getattr(error, "errno", None) in _FULL or any(f"os error {n})" in str(error) for n in _FULL)
        return full or isinstance(error, CommitFailedError)


class S3Storage(Storage):
    """A prefix of an existing bucket. The constructor raises `ConfigError` if `store.dir` names no bucket."""

    scheme = S3

    def __init__(self, config: Config) -> None:
        root = config.store.dir.removeprefix(S3).strip("/")
        if not root:
            raise ConfigError(f"store.dir: {config.store.dir!r} names no bucket; write s3://<bucket>/<prefix>")
        self.options = {"timeout": f"{REQUEST_S:g}s", "aws_conditional_put": "etag"}
        if endpoint := config.store.s3_endpoint:
            scheme = endpoint.partition("://")[0]
            self.options |= {"aws_endpoint_url": endpoint, "aws_allow_http": str(scheme == "http").lower()}
        if region := config.store.s3_region:
            self.options["aws_region"] = region
        super().__init__(open_s3(config.store), root)

    def url(self, tag: str, name: str) -> str:
        return f"{_DUCKDB_S3}://{self.key(tag, name)}"

    def attach(self, connection: duckdb.DuckDBPyConnection) -> None:
        if not connection.filesystem_is_registered(_DUCKDB_S3):
            from fsspec.implementations.arrow import ArrowFSWrapper  # takes a while to import

            class ForDuckDB(ArrowFSWrapper):  # type: ignore[misc]
                protocol = _DUCKDB_S3
                cachable = False

                @classmethod
                def _strip_protocol(cls, path: str) -> str:
                    return path.removeprefix(f"{_DUCKDB_S3}://")

            connection.register_filesystem(ForDuckDB(self.files))

    def _is_damage(self, error: Exception, key: str) -> bool:
        """A failure of the network is an `OSError` without a number too, so the content is read again from memory."""
        if not isinstance(error, OSError):
            return super()._is_damage(error, key)
        try:
            with self.files.open_input_file(key) as file:
                content = file.read_buffer()
        except OSError:
            return False
        try:
            pq.ParquetFile(pa.BufferReader(content)).read()
        except _UNREADABLE:
            return True
        return False

    def put(self, folder: str, name: str, content: bytes) -> None:
        with self.files.open_output_stream(self.key(folder, name)) as stream:
            stream.write(content)

    def write(self, tag: str, name: str, tables: Iterable[pa.Table]) -> int:
        """Build the file in memory, then upload it. Writing into an S3 stream directly would be wrong: an exception
        closes the stream, which completes the object with half of its content."""
        sink = pa.BufferOutputStream()
        write_parquet(sink, tag, tables)
        content = sink.getvalue()
        self.put(tag, name, content)
        return int(content.size)

    def is_retryable(self, error: Exception) -> bool:
        """Return true: object storage can become reachable again, and access rights can be corrected."""
        return True


def open_storage(config: Config) -> Storage:
    """Return the storage of a run's lake. Raises `ConfigError` if `store.dir` names no bucket."""
    if config.store.dir.startswith(S3):
        return S3Storage(config)
    return LocalStorage(config.path(config.store.dir))


def write_parquet(where: Any, tag: str, tables: Iterable[pa.Table]) -> None:
    """Write tables of one schema to a path or an Arrow stream, one row group each. Compressed with zstd at level 1;
    packed numbers are byte-stream-split, short text is dictionary-encoded."""
    split, dictionary = columns.split_columns(tag)
    tables = iter(tables)
    first = next(tables)
    with pq.ParquetWriter(
        where,
        first.schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=dictionary,
        column_encoding=dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        store_schema=False,
    ) as writer:
        for table in itertools.chain([first], tables):
            writer.write_table(table)
