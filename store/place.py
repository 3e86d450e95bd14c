"""Where the lake is: a folder on this machine's disk, or a prefix in S3-compatible object storage. Also the store's
errors.

delta-rs commits on both. What it leaves to its callers is here: on a disk, durability (it never calls fsync); on object
storage, a client for DuckDB, whose own S3 support is an extension that would be downloaded at run time.

`store.dir` is a folder, or `s3://<bucket>/<prefix>`. Credentials come from the AWS_* variables only.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.exceptions import CommitFailedError
from pyarrow import fs

from pipeline.config import Config, ConfigError
from pipeline.files import sync
from store import columns

if TYPE_CHECKING:
    import duckdb  # the writer does not need it

LOG = "_delta_log"
"""Folder of a table's commits."""
ASIDE = "damaged"
"""Folder of the place for damaged files."""
SUFFIX = ".parquet"

_S3 = "s3://"
_DUCKDB_S3 = "journeyman-s3"
_REQUEST_S = 30.0
"""A request to object storage that is not answered for so long is repeated."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class StoreError(Exception):
    """Base of the store's errors."""


class DamagedFileError(StoreError):
    """A file that is shorter or longer than its commit says; `path` names it."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"{path} is damaged ({why}): restart the store, which sets the file aside and reads its events from "
            "the log again"
        )
        self.path = path


class Place(ABC):
    """A place with one folder per event tag, each a Delta table."""

    options: dict[str, str]
    """delta-rs's storage options."""
    needs_sync = False
    """Whether what was written may be lost in a power cut until `make_durable` returns."""
    _damage: tuple[type[Exception], ...] = (pa.ArrowException, OSError)
    """What reading a damaged file raises."""

    def __init__(self, files: fs.FileSystem, root: str) -> None:
        self.files, self.root = files, root

    def __str__(self) -> str:
        return self.uri("").rstrip("/")

    @abstractmethod
    def uri(self, tag: str) -> str:
        """The address of a tag's table for delta-rs."""

    @abstractmethod
    def url(self, tag: str, name: str) -> str:
        """The path or URL by which DuckDB reads a file, after `attach`."""

    def attach(self, connection: duckdb.DuckDBPyConnection) -> None:  # noqa: B027 - local files need nothing
        """Let `connection` read the URLs. Safe to repeat."""

    def key(self, tag: str, name: str) -> str:
        """The path of a file in `files`."""
        return f"{self.root}/{tag}/{name}"

    def exists(self) -> bool:
        """Whether anything was ever written here."""
        return bool(self.files.get_file_info(fs.FileSelector(self.root, allow_not_found=True)))

    def sizes(self, tag: str, names: Sequence[str] = ()) -> dict[str, int]:
        """The tag's Parquet files, or those of `names` that exist, with their sizes in bytes. A file need not be
        committed."""
        wanted = [self.key(tag, n) for n in names] or fs.FileSelector(
            f"{self.root}/{tag}", allow_not_found=True
        )
        found = self.files.get_file_info(wanted)
        return {i.base_name: int(i.size) for i in found if i.is_file and i.base_name.endswith(SUFFIX)}

    def read(self, tag: str, name: str, names: list[str] | None = None) -> pa.Table:
        """A file's table, or the columns `names` of it. Raises `FileNotFoundError`, `DamagedFileError`."""
        with self._reading(tag, name) as file:
            return pq.ParquetFile(file).read(columns=names)

    def footer(self, tag: str, name: str) -> pq.FileMetaData:
        """A file's footer. Raises `FileNotFoundError`, `DamagedFileError`."""
        with self._reading(tag, name) as file:
            return pq.ParquetFile(file).metadata

    @contextlib.contextmanager
    def _reading(self, tag: str, name: str) -> Iterator[Any]:
        try:
            with self.files.open_input_file(self.key(tag, name)) as file:
                yield file
        except FileNotFoundError:
            raise
        except self._damage as error:
            raise DamagedFileError(self.url(tag, name), str(error)) from error

    @abstractmethod
    def write(self, tag: str, name: str, tables: Iterable[pa.Table]) -> int:
        """Write a file that no commit names yet, with a row group for each table. It is complete and durable on return.
        Returns its size in bytes. Raises `OSError`."""

    def make_durable(self, tag: str, names: Iterable[str]) -> None:  # noqa: B027 - an answered upload is durable
        """Return once these files of a tag's folder, and their names, survive a power cut. Missing files are left
        out."""

    def set_aside(self, tag: str, name: str) -> str:
        """Move a damaged file out of its table's folder; returns its new path. Safe to repeat."""
        aside = f"{self.root}/{ASIDE}/{tag}-{name.replace('/', '-')}"
        self.files.create_dir(f"{self.root}/{ASIDE}")
        if self.files.get_file_info(self.key(tag, name)).type != fs.FileType.NotFound:
            self.files.move(self.key(tag, name), aside)
        return aside

    @abstractmethod
    def is_retryable(self, error: Exception) -> bool:
        """Whether a write that failed with `error` can succeed later without a restart of the store."""


class Folder(Place):
    """A folder on this machine's disk."""

    needs_sync = True

    def __init__(self, root: str | Path) -> None:
        super().__init__(fs.LocalFileSystem(), str(Path(root).absolute()))
        self.options = {}

    def exists(self) -> bool:
        return Path(self.root).is_dir()

    def uri(self, tag: str) -> str:
        return f"{self.root}/{tag}"

    def url(self, tag: str, name: str) -> str:
        return self.key(tag, name)

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
        """A full disk can get room again, and other writers pause. delta-rs tells the cause in words only."""
        full = getattr(error, "errno", None) in _FULL or any(f"os error {n})" in str(error) for n in _FULL)
        return full or isinstance(error, CommitFailedError)


class Bucket(Place):
    """A prefix of an existing bucket. Raises `ConfigError` where `store.dir` names no bucket."""

    _damage = (pa.ArrowInvalid,)  # a failure of the network is an OSError

    def __init__(self, config: Config) -> None:
        root = config.store.dir.removeprefix(_S3).strip("/")
        if not root:
            raise ConfigError(
                f"store.dir: {config.store.dir!r} names no bucket: write s3://<bucket>/<prefix>"
            )
        # Folders are prefixes of names: no objects need to be made for them.
        settings: dict[str, Any] = {
            "check_directory_existence_before_creation": False,
            "request_timeout": _REQUEST_S,
        }
        self.options = {"timeout": f"{_REQUEST_S:g}s", "aws_conditional_put": "etag"}
        if endpoint := config.store.s3_endpoint:
            scheme = endpoint.partition("://")[0]
            settings |= {"endpoint_override": endpoint, "scheme": scheme}
            self.options |= {"aws_endpoint_url": endpoint, "aws_allow_http": str(scheme == "http").lower()}
        if region := config.store.s3_region:
            settings["region"] = region
            self.options["aws_region"] = region
        super().__init__(fs.S3FileSystem(**settings), root)

    def uri(self, tag: str) -> str:
        return f"{_S3}{self.root}/{tag}"

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

    def write(self, tag: str, name: str, tables: Iterable[pa.Table]) -> int:
        """The file is made in memory first: an exception would close a stream into S3, and thereby complete the
        object."""
        sink = pa.BufferOutputStream()
        write_parquet(sink, tag, tables)
        content = sink.getvalue()
        with self.files.open_output_stream(self.key(tag, name)) as stream:
            stream.write(content)
        return int(content.size)

    def is_retryable(self, error: Exception) -> bool:
        """Object storage can come back, and its access rights can be mended."""
        return True


def open_place(config: Config) -> Place:
    """The place of a run's lake. Raises `ConfigError` where `store.dir` names no bucket."""
    if config.store.dir.startswith(_S3):
        return Bucket(config)
    return Folder(config.path(config.store.dir))


def write_parquet(where: Any, tag: str, tables: Iterable[pa.Table]) -> None:
    """Write tables of one schema to a path or an Arrow stream, a row group each: zstd at level 1, packed numbers
    byte-stream-split, short text dictionary-encoded."""
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
