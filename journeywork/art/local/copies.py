"""Copies of a model's folder and versions in a bucket, laid out as a lake: `models.0.start` takes them too."""

from __future__ import annotations

import os
import tarfile

from journeywork.forking import ADAPTER, EVENT, Version, checkpoints_folder, versions_in

_LOGS = ("history.jsonl", "state.json", "trajectories")
"""What a model's folder holds beside its installation."""


def bucket_url(s3_bucket: str | None, prefix: str | None) -> str | None:
    """Return the URL of the copies in a bucket (default: $BACKUP_BUCKET); `None` without a bucket."""
    bucket = s3_bucket or os.environ.get("BACKUP_BUCKET")
    return "s3://" + "/".join(filter(None, (bucket, (prefix or "").strip("/")))) if bucket else None


def steps_in(lake: str, project: str, model: str) -> list[int]:
    """Return the steps of the versions of a model that a lake holds whole, in no order. Blocks.

    `lake` is the path of a folder or an `s3://` URL. Raises `OSError` if object storage cannot be read."""
    return [version.step for version in versions_in(lake, checkpoints_folder(project, model))]


def copy_version(source: str, destination: str, project: str, model: str, step: int) -> None:
    """Copy a version from one lake to another, unless it is there. Blocks. Raises `OSError`."""
    if step in steps_in(destination, project, model):
        return
    from pyarrow import fs

    folder = Version(project, "main", model, step).folder
    (files, root), (into, target) = fs.FileSystem.from_uri(source), fs.FileSystem.from_uri(destination)
    # The event goes last, as in `steps_in`.
    entries = files.get_file_info(fs.FileSelector(f"{root}/{folder}"))
    for entry in sorted(entries, key=lambda entry: entry.base_name == EVENT):
        into.create_dir(f"{target}/{folder}")
        fs.copy_files(entry.path, f"{target}/{folder}/{entry.base_name}", files, into)


def unpack_adapter(lake: str, version: Version, folder: str) -> None:
    """Write the PEFT adapter of a version into a folder. Blocks. Raises `OSError` and `tarfile.TarError`."""
    from pyarrow import fs

    files, root = fs.FileSystem.from_uri(lake)
    with (
        files.open_input_stream(f"{root}/{version.folder}/{ADAPTER}") as stream,
        tarfile.open(fileobj=stream, mode="r|") as tar,
    ):
        tar.extractall(folder, filter="data")


def copy_logs(source: str, destination: str) -> None:
    """Copy what a model's folder holds beside its installation. Blocks. Raises `OSError`."""
    from pyarrow import fs

    (files, root), (into, target) = fs.FileSystem.from_uri(source), fs.FileSystem.from_uri(destination)
    for name in _LOGS:
        if files.get_file_info(f"{root}/{name}").type != fs.FileType.NotFound:
            into.create_dir(target)
            fs.copy_files(f"{root}/{name}", f"{target}/{name}", files, into)
