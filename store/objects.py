"""The store's files in S3-compatible object storage.

An object appears when its upload is complete, so no temporary name is needed: a file is made in memory and
uploaded with one call. A crash before the end leaves parts of an upload that no reader sees. All reads use
pyarrow's S3 client, DuckDB's too (as the filesystem `journeyman-s3://`): DuckDB's own S3 support is an extension
that would be downloaded at run time.

`store.dir` is `s3://<bucket>/<prefix>`. Credentials come from the AWS_* variables or files that every S3 client
reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import duckdb
import pyarrow as pa
from fsspec.implementations.arrow import ArrowFSWrapper
from pyarrow import fs

from pipeline import crash
from pipeline.config import Config, ConfigError
from store import target
from store.target import Target

_SCHEME = "s3://"
_PROTOCOL = "journeyman-s3"


class _ForDuckDB(ArrowFSWrapper):  # type: ignore[misc]
    """The S3 client as an fsspec filesystem, which is what DuckDB takes."""

    protocol = _PROTOCOL
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix(f"{_PROTOCOL}://")


def _client(config: Config) -> fs.S3FileSystem:
    settings: dict[str, Any] = {
        # A small file is then one request.
        "allow_delayed_open": True,
        # Folders are prefixes of names: no objects need to be made for them.
        "check_directory_existence_before_creation": False,
    }
    if config.store.s3_endpoint:
        scheme, _, _ = config.store.s3_endpoint.partition("://")
        settings |= {"endpoint_override": config.store.s3_endpoint, "scheme": scheme}
    if config.store.s3_region:
        settings["region"] = config.store.s3_region
    return fs.S3FileSystem(**settings)


class ObjectTarget(Target):
    """A prefix of an existing bucket. Raises `ConfigError` where `store.dir` names no bucket."""

    def __init__(self, config: Config) -> None:
        root = config.store.dir.removeprefix(_SCHEME).strip("/")
        if not root:
            raise ConfigError(
                f"store.dir: {config.store.dir!r} names no bucket: write s3://<bucket>/<prefix>"
            )
        super().__init__(_client(config), root, _SCHEME)
        self._lock = config.path("store.lock")
        self._infos: dict[tuple[str, str], fs.FileInfo] = {}
        """Information about the files listed last. Files never change, so each is looked up once."""
        self._footers: dict[tuple[str, str], dict[str, str]] = {}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks out a second process of this run on this machine. Object storage has no locks, so others are not
        noticed."""
        with target.locked_file(self._lock, str(self)):
            yield

    def url(self, tag: str, name: str) -> str:
        return f"{_PROTOCOL}://{self._key(tag, name)}"

    def attach(self, connection: duckdb.DuckDBPyConnection) -> None:
        if not connection.filesystem_is_registered(_PROTOCOL):
            connection.register_filesystem(_ForDuckDB(self._fs))

    def _files(self, tag: str) -> list[fs.FileInfo]:
        found = {i.base_name: i for i in super()._files(tag)}
        for known in [k for k in self._infos if k[0] == tag and k[1] not in found]:
            self._forget(*known)
        self._infos.update({(tag, name): info for name, info in found.items()})
        return list(found.values())

    def _forget(self, tag: str, name: str) -> None:
        self._infos.pop((tag, name), None)
        self._footers.pop((tag, name), None)

    def _info(self, tag: str, name: str) -> fs.FileInfo:
        if (tag, name) not in self._infos:
            self._infos[tag, name] = super()._info(tag, name)
        return self._infos[tag, name]

    def write(self, tag: str, name: str, tables: Iterable[pa.Table], metadata: dict[str, str]) -> None:
        """The file is made in memory first: an exception would close a stream into S3, and thereby complete the
        object."""
        sink = pa.BufferOutputStream()
        target.write_parquet(sink, tag, tables, metadata)
        content = sink.getvalue()
        crash.point("store.before_rename")
        with self._fs.open_output_stream(self._key(tag, name)) as stream:
            stream.write(content)
        crash.point("store.after_rename")
        self._forget(tag, name)

    def is_retryable(self, error: OSError) -> bool:
        """Object storage can come back, and its access rights can be mended."""
        return True

    def check(self, tag: str, name: str) -> None:
        """Reads the footer once per file: S3 holds complete objects only."""
        self.metadata(tag, name)

    def metadata(self, tag: str, name: str) -> dict[str, str]:
        found = self._footers.get((tag, name))
        if found is None:
            found = self._footers[tag, name] = super().metadata(tag, name)
        return found

    def _is_damage(self, error: Exception) -> bool:
        """A failure of the network is an OSError."""
        return isinstance(error, pa.ArrowInvalid)

    def remove(self, tag: str, name: str) -> None:
        super().remove(tag, name)
        self._forget(tag, name)

    def set_aside(self, tag: str, name: str) -> str:
        self._forget(tag, name)
        return super().set_aside(tag, name)
