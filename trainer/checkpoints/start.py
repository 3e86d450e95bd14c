"""What training begins with where the project has no version of a model yet (`models.0.start`): a PEFT adapter, or a
version of a lake with its optimizer."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import msgspec
from pyarrow import fs

from pipeline.config import Config, ConfigError
from pipeline.events import STATE_FILE, CheckpointPublished, decode
from pipeline.security.signing import Trust
from pipeline.versions.lake_files import ADAPTER, EVENT, S3, checkpoint_folder, open_s3
from trainer.checkpoints.checkpoint import ADAPTER_FILES, CheckpointError, unpack

_VERSION = re.compile(r"(?:(?:(?P<project>[^/]+)/)?(?P<branch>[^/]+)/)?(?P<model>[^/]+)@(?P<step>[1-9][0-9]{0,17})")
_OTHER_ADAPTERS = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform")
"""Keys of adapter_config.json that change what an adapter computes, and that the trainer does not set."""
_PLAIN = {"peft_type": "LORA", "bias": "none"}
"""Keys of adapter_config.json with the only value that the trainer can train."""


@dataclass(frozen=True, eq=False)
class Start:
    """An adapter that training begins with."""

    source: str
    """Its address, as the checkpoint's event names it."""
    files: dict[str, bytes]
    """Those of a PEFT adapter folder, with the training state if there is one."""
    event: CheckpointPublished | None = None
    """The version's event; `None` for an adapter that was trained elsewhere."""


def read_start(start: str, config: Config) -> Start:
    """Read what `models.0.start` names. Blocks. Raises `ConfigError` if it is not there or can't be used."""
    if (Path(start) / "adapter_config.json").is_file():
        return _peft_folder(Path(start))
    lake, _, version = start.rpartition("#")
    match = _VERSION.fullmatch(version)
    if not lake or match is None:
        raise ConfigError(
            f"models.start: {start!r} is neither a folder with adapter_config.json nor a version: write "
            "<lake>#<branch>/<model>@<step>, such as runs/x#main/support@12. <lake> is a run directory, a store.dir or "
            "s3://<bucket>/<prefix>; the step is 1 or more, and a slash within a name is %2F"
        )
    files, root = _open_lake(lake, config)
    project, branch, model = (unquote(part or "") for part in match.group("project", "branch", "model"))
    folder = checkpoint_folder(project or config.project, branch or "main", model, int(match["step"]))
    try:
        return _read_folder(files, f"{root}/{folder}", start)
    except FileNotFoundError as error:
        raise ConfigError(
            f"models.start: {root} holds no {folder}: check the project, the branch, the step, whether a slash "
            "within a name is written as %2F, and whether the store of that run keeps versions (store.checkpoints)"
        ) from error
    except (OSError, msgspec.DecodeError, CheckpointError) as error:
        raise ConfigError(f"models.start: {start} can't be read: {error}") from error


def read_version(config: Config, model: str, step: int) -> Start:
    """Read a version of the project and branch of the settings from their own lake. Blocks.

    Raises `CheckpointError` if the lake does not hold it whole, or no trainer that is trusted signed it as this one."""
    lake = config.store.dir if config.store.dir.startswith(S3) else str(config.path(config.store.dir))
    files, root = _open_lake(lake, config)
    identity = config.project, config.trainer.branch, model, step
    folder = f"{root}/{checkpoint_folder(*identity)}"
    try:
        version = _read_folder(files, folder, folder)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"step {step} of {model} is neither on disk nor in the lake {root}: check --step and --model, and whether "
            "the store keeps versions (store.checkpoints)"
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"step {step} is not on disk, and can't be read from the lake: {error}") from error
    event = version.event
    assert event is not None, "a version has its event"
    if objection := Trust(config.signing).objection(event):
        raise CheckpointError(objection)
    # The signature covers the event, not the name of its folder.
    if (event.project, event.branch, event.model, event.step) != identity:
        raise CheckpointError(f"{folder} holds {event.version} of branch {event.branch} of project {event.project}")
    return version


def _peft_folder(folder: Path) -> Start:
    """Read an adapter that was trained elsewhere. Raises `ConfigError` if it is of a kind that the trainer does not
    train."""
    try:
        files = {name: (folder / name).read_bytes() for name in ADAPTER_FILES}
        config = msgspec.json.decode(files["adapter_config.json"], type=dict[str, object])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"models.start: {folder} is no PEFT adapter: {error}") from error
    untrained = [f"{key}={config[key]}" for key, plain in _PLAIN.items() if config.get(key, plain) != plain]
    # 0 of layers_to_transform is a layer.
    untrained += [key for key in _OTHER_ADAPTERS if config.get(key) or type(config.get(key)) is int]
    if untrained:
        raise ConfigError(
            f"models.start: the adapter in {folder} uses {', '.join(untrained)}, which the trainer does not train: "
            "merge it into its base, and name the merged model as models.base"
        )
    return Start(str(folder), files)


def _open_lake(lake: str, config: Config) -> tuple[fs.FileSystem, str]:
    """Return the file system of a lake, and the lake's path in it. `lake`: a run directory, a `store.dir` or an S3
    address."""
    if lake.startswith(S3):
        return open_s3(config.store), lake.removeprefix(S3).strip("/")
    folder = Path(lake).absolute()
    return fs.LocalFileSystem(), str(folder / "store" if (folder / "store").is_dir() else folder)


def _read_folder(files: fs.FileSystem, folder: str, source: str) -> Start:
    """Read a version's folder in a lake. `source`: its address. Raises `CheckpointError` if its files do not match the
    digests of its event."""

    def read(name: str) -> bytes:
        with files.open_input_file(f"{folder}/{name}") as file:
            return bytes(file.read())

    event = decode(read(EVENT))
    if not isinstance(event, CheckpointPublished):
        raise CheckpointError(f"{folder}/{EVENT} is no checkpoint's event")
    archive = read(ADAPTER)
    if hashlib.sha256(archive).hexdigest() != event.adapter_sha256:
        raise CheckpointError(f"{folder}/{ADAPTER} does not match the SHA-256 of its event")
    adapter = unpack(archive)
    state = files.get_file_info(f"{folder}/{STATE_FILE}")
    if state.type != fs.FileType.NotFound:
        adapter[STATE_FILE] = read(STATE_FILE)
        if hashlib.sha256(adapter[STATE_FILE]).hexdigest() != event.files.get(STATE_FILE):
            raise CheckpointError(f"{folder}/{STATE_FILE} does not match the SHA-256 of its event")
    return Start(source, adapter, event)
