"""`journeywork backup`: copy a stopped installation: log, lake, checkpoints and keys.

    journeywork backup /mnt/backups/monday --run-dir runs/support

A backup is a folder with the files of the run directory, and `backup.json`, which is written last and has the size and
the SHA-256 of each. While it is made, `journeywork up` is refused, so that log, lake and checkpoints are of one moment
(docs/decisions/log.md says why). `journeywork restore` makes a run directory of it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import msgspec
from pyarrow import fs

from pipeline.config import Config, ConfigError
from pipeline.events import now_us
from pipeline.files import write_whole
from pipeline.running import folder_lock
from pipeline.running.installations import installation_settings
from pipeline.running.state import STATE
from pipeline.terminal.parsers import command_parser, exit_on_error
from pipeline.versions.lake_files import S3, open_s3

MANIFEST = "backup.json"
_STORE = "store"
_LEFT_OUT = ("adapters", "logs", STATE, MANIFEST)
"""At the top of a run directory, besides locks: what each start makes anew, and logs."""


class File(msgspec.Struct):
    """A file of a backup: its size in bytes, its digest in hexadecimal."""

    size: int
    sha256: str


class Manifest(msgspec.Struct):
    """Content of `backup.json`. `made_at`: Unix time in microseconds. `files`: by their paths in the run directory."""

    journeywork: str
    made_at: int
    run_dir: str
    files: dict[str, File]


def backup(config: Config, folder: Path) -> Manifest:
    """Copy the stopped run of `config` into `folder`, which must be empty or new. A lake elsewhere (`store.dir`) is
    copied to where a new run directory has it.

    Raises `InstallationInUseError` while it is in use, and `ConfigError` if the folder can't be used or if the log is
    on a NATS server of the user's own."""
    run_dir = Path(config.run_dir)
    if not (run_dir / "nats" / "jetstream").is_dir():
        raise ConfigError(
            f"{run_dir} holds no log: if its log is on a NATS server of your own, docs/operations.md says under "
            "Backups how to copy it"
        )
    if folder.resolve().is_relative_to(run_dir.resolve()):
        raise ConfigError(f"{folder} is inside of the run directory: name a folder elsewhere")
    require_empty(folder)
    lake_is_inside = config.path(config.store.dir).resolve() == config.path(_STORE).resolve()
    left_out = _LEFT_OUT if lake_is_inside else (*_LEFT_OUT, _STORE)
    with folder_lock.lock_exclusively(run_dir, "journeywork backup"):
        folder_lock.make_private(folder)
        names = ((name.partition("/")[0], name) for name in _files(run_dir))
        copied = (name for top, name in names if top not in left_out and not top.endswith(".lock"))
        files = {name: copy(run_dir / name, folder / name) for name in copied}
        if not lake_is_inside:
            source, path = _lake(config)
            fs.copy_files(path, str(folder / _STORE), source_filesystem=source)
            files |= {f"{_STORE}/{name}": _digest(folder / _STORE / name) for name in _files(folder / _STORE)}
        os.sync()  # the manifest says that every file is on the disk
        manifest = Manifest(version("journeywork"), now_us(), str(run_dir.resolve()), files)
        write_whole(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)), durable=True)
    return manifest


def _lake(config: Config) -> tuple[fs.FileSystem, str]:
    """Return the file system of the lake and the lake's path in it."""
    lake = config.store.dir
    if lake.startswith(S3):
        return open_s3(config.store), lake.removeprefix(S3).strip("/")
    return fs.LocalFileSystem(), str(config.path(lake).absolute())


def require_empty(folder: Path) -> None:
    """Raise `ConfigError` if `folder` exists and is anything else than an empty folder."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} is there and not an empty folder: name a new one")


def _files(folder: Path) -> Iterator[str]:
    """Yield the relative paths of all files. Links to folders are followed: a lake may be on another disk."""
    for parent, _, names in os.walk(folder, followlinks=True):
        for name in sorted(names):
            yield str(Path(parent, name).relative_to(folder))


def copy(source: Path, target: Path) -> File:
    """Copy a file; return the size and the digest of the copy, which only the owner may read."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    shutil.copyfile(source, target)
    target.chmod(0o600)
    return _digest(target)


def _digest(path: Path) -> File:
    """Return size and digest of a file."""
    with path.open("rb") as file:
        return File(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def main() -> None:
    """Run the command. Exits 0, or 2 if the run can't be copied."""
    parser = command_parser("backup", __doc__)
    parser.add_argument("folder", type=Path, help="a new folder, outside of the run directory")
    parser.add_argument("--run-dir", help="default: the newest under runs/")
    args = parser.parse_args()
    os.umask(0o077)
    with exit_on_error("backup", (ConfigError, OSError)):
        manifest = backup(installation_settings(args.run_dir), args.folder)
    size = sum(file.size for file in manifest.files.values())
    sys.stdout.write(f"{args.folder} holds {len(manifest.files)} files of {manifest.run_dir}, {size:,} bytes\n")


if __name__ == "__main__":
    main()
