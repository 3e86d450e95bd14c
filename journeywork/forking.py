"""`journeywork fork SOURCE --run-dir DIR`: start an installation whose training begins with another's version.

    journeywork fork runs/demo --run-dir runs/fork                       the newest version of the only model
    journeywork fork 'runs/demo#inbox@40' --run-dir runs/fork        that version, optimizer included
    journeywork fork 's3://bucket/lake#p/main/m' --run-dir runs/fork     the newest of a model in object storage
    journeywork fork adapters/sft --run-dir runs/fork --set ...          a PEFT adapter; the rest goes to `up`

It is `journeywork up` with the settings of the version: `project`, `models.0.name`, `models.0.base`, `trainer.lora` and
`models.0.start`. A name or branch of its own: `--set models.0.name=...`, `--set trainer.branch=...`."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from journeywork.command_line import exit_status

ADAPTER, CONFIG, EVENT = "adapter.tar", "adapter_config.json", "event.msgpack"
_OF_UP = ("--config", "--nats-url", "--services", "--set", "--vllm-url")
"""Options of `journeywork up` that take a value; known here, so that no value is read as the source."""
_SOURCE = re.compile(r"(?:(?:([^/@]+)/)?([^/@]+)/)?([^/@]+)(?:@([0-9]+))?")


class ForkError(Exception):
    """There is nothing to fork, or no place for it. The message says why."""


@dataclass(frozen=True)
class Version:
    """A version that a lake holds whole."""

    project: str
    branch: str
    model: str
    step: int

    @property
    def name(self) -> str:
        """Its name in `models.0.start`, after the lake and `#`. A slash in a part is escaped: `p/main/org%2Fm@3`."""
        names = (quote(name, safe=":+=,~") for name in (self.project, self.branch, self.model))
        return f"{'/'.join(names)}@{self.step}"

    @property
    def folder(self) -> str:
        """Its folder, relative to a run directory or a lake."""
        return f"{checkpoints_folder(self.project, self.model, self.branch)}/step-{self.step:08d}"


def checkpoints_folder(project: str, model: str, branch: str = "main") -> str:
    """Return the folder of a model's versions, relative to a run directory or a lake.

    Names are escaped: `qwen2.5` becomes `qwen2%2E5`."""
    escaped = (quote(name, safe="@:+=,~").replace(".", "%2E") for name in (project, branch, model))
    return "/".join(("checkpoints", *escaped))


def versions_in(lake: str) -> Iterator[Version]:
    """Return the versions of a lake, in no order. Blocks.

    `lake` is the path of a folder or an `s3://` URL. Raises `OSError` if object storage cannot be read."""
    from pyarrow import fs  # not a dependency of the SDK alone; an installation has it

    files, root = fs.FileSystem.from_uri(lake)
    selector = fs.FileSelector(f"{root}/checkpoints", allow_not_found=True, recursive=True)
    for entry in files.get_file_info(selector):
        # The store writes the event last: a folder without it is a copy that was interrupted.
        if entry.base_name == EVENT:
            *_, project, branch, model, step, _ = map(unquote, entry.path.split("/"))
            yield Version(project, branch, model, int(step.removeprefix("step-")))


def adapter_config(lake: str, version: Version) -> dict[str, Any]:
    """Return PEFT's configuration of a version. Blocks. Raises `OSError`, and `ForkError` if it is damaged."""
    from pyarrow import fs

    files, root = fs.FileSystem.from_uri(lake)
    with files.open_input_stream(f"{root}/{version.folder}/{ADAPTER}") as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                member = next(tar.extractfile(entry) for entry in tar if Path(entry.name).name == CONFIG)
                return dict(json.load(member)) if member else {}
        except (tarfile.TarError, StopIteration, TypeError, ValueError) as error:
            raise ForkError(f"{version.name} in {lake} is damaged: {error or f'no {CONFIG}'}") from error


def version_to_fork(
    lake: str, project: str | None = None, model: str | None = None, *, branch: str = "main", step: int | None = None
) -> Version:
    """Return the newest version with these names and this step. Blocks.

    Raises `ForkError` if there is none, or if the names leave several models; `OSError` if the lake can't be read."""
    every = list(versions_in(lake))
    matching = [
        version
        for version in every
        if version.branch == branch
        and project in (None, version.project)
        and model in (None, version.model)
        and step in (None, version.step)
    ]
    models = sorted({version.name.rpartition("@")[0] for version in matching or every})
    if not matching or len(models) > 1:
        pattern = f"{project or '*'}/{branch}/{model or '*'}@{'*' if step is None else step}"
        raise ForkError(
            f"{lake} holds {'several models' if matching else 'no version'} that can be forked as {pattern}; it has: "
            f"{', '.join(models) or 'none'}"
        )
    return max(matching, key=lambda version: version.step)


def settings_of(source: str) -> dict[str, Any]:
    """Return the settings of an installation that begins with a source: a PEFT folder, or a lake and the names of a
    version. Blocks. Raises `ForkError` and `OSError`."""
    if (config_file := Path(source) / CONFIG).is_file():
        try:
            config = dict(json.loads(config_file.read_text("utf-8")))
        except (TypeError, ValueError) as error:
            raise ForkError(f"{config_file} is no configuration of PEFT: {error}") from error
        settings = {"models.0.start": str(Path(source).resolve())}
    else:
        lake, _, names = source.partition("#")
        if not lake.startswith("s3://"):
            folder = Path(lake).resolve()
            lake = str(folder / "store" if (folder / "store").is_dir() else folder)
        match = _SOURCE.fullmatch(names or "*")
        if match is None:
            raise ForkError(
                f"{names!r} is no version: write <project>/<branch>/<model>@<step>, or less of it, a slash within a "
                "name as %2F"
            )
        *parts, step = match.groups()
        project, branch, model = (part and unquote(part) for part in parts)
        version = version_to_fork(
            lake, project, model if names else None, branch=branch or "main", step=int(step) if step else None
        )
        config = adapter_config(lake, version)
        settings = {
            "project": version.project,
            "models.0.name": version.model,
            "models.0.start": f"{lake}#{version.name}",
        }
    if missing := [key for key in ("r", "lora_alpha") if key not in config]:
        raise ForkError(f"{CONFIG} of {source} has no {missing[0]!r}: it is not the configuration of a LoRA adapter")
    return settings | {
        "models.0.base": config.get("base_model_name_or_path", ""),
        "trainer.lora.rank": config["r"],
        "trainer.lora.alpha": config["lora_alpha"],
        **({"trainer.lora.experts": True} if config.get("target_parameters") else {}),
    }


def flags(settings: dict[str, Any]) -> list[str]:
    """Return settings as arguments of `journeywork up`."""
    return [part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")]


def main(argv: Sequence[str] | None = None) -> None:
    """Become `journeywork up` with the settings of the source that `argv` (default: the command line) names. Exits 2 if
    there is nothing to fork."""
    parser = argparse.ArgumentParser(
        prog="journeywork fork", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source", help="a run directory, a store.dir or s3://<bucket>/<prefix>, #<model>@<step>; a PEFT folder"
    )
    parser.add_argument("--run-dir", required=True, type=Path, help="of the new installation")
    for name in _OF_UP:
        parser.add_argument(name, dest=name, action="append", default=[], help=argparse.SUPPRESS)
    args, options = parser.parse_known_args(argv)
    options += [part for name in _OF_UP for value in getattr(args, name) for part in (name, value)]
    with exit_status((ForkError, OSError), ()):
        if (args.run_dir / "config.toml").exists():
            raise ForkError(f"{args.run_dir} has begun already: give another --run-dir")
        settings = settings_of(args.source)
    command = ["-m", "pipeline", "up", "--run-dir", str(args.run_dir), *flags(settings), *options]
    os.execv(sys.executable, [sys.executable, *command])  # noqa: S606 - a command of ours


if __name__ == "__main__":
    main()
