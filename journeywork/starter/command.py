"""`journeywork init NAME`: write a starter project: an agent with tasks and a reward, settings, a README and a test.

    journeywork init support && cd support

The project's README says how to train and how to evaluate.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from journeywork.command_line import exit_status

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_PLACEHOLDER = "starter_model"
FILES = ("agent.py", "journeywork.toml", "README.md", "test_agent.py")


class InitError(Exception):
    """The project could not be written. The message says why."""


def write_project(name: str, folder: Path, base: str = "") -> list[Path]:
    """Write the project `name` into `folder` and return its files. `base` is the base model in the settings.

    Raises `InitError` if the name cannot be that of a model, or the folder has files already or cannot be made."""
    if not _NAME.fullmatch(name):
        raise InitError(
            f"{name!r} cannot be a project: use up to 64 letters, digits, `-` and `_`, a letter first"
        )
    if folder.exists() and not folder.is_dir():
        raise InitError(f"{folder} is a file: choose another name, or a folder with --dir")
    if folder.exists() and any(folder.iterdir()):
        raise InitError(f"{folder} exists and is not empty: choose another name, or a folder with --dir")
    template = resources.files("journeywork.starter").joinpath("template")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InitError(f"{folder} cannot be made: {error.strerror}; choose a folder with --dir") from error
    written = []
    for file in FILES:
        text = template.joinpath(file).read_text("utf-8").replace(_PLACEHOLDER, name)
        if base and file == "journeywork.toml":
            # `journeywork up` runs in the project's folder.
            named = str(Path(base).absolute()) if Path(base).is_dir() else base
            text = text.replace('base = "Qwen/Qwen3-4B"', f"base = {json.dumps(named, ensure_ascii=False)}")
        (folder / file).write_text(text, "utf-8")
        written.append(folder / file)
    return written


def main(argv: Sequence[str] | None = None) -> None:
    """Write the project that `argv` (default: the command line) names, and print what to do next. Exits 2 if it cannot
    be written."""
    parser = argparse.ArgumentParser(
        prog="journeywork init", description="Write a starter project that runs."
    )
    parser.add_argument("name", help="name of the project and of its model")
    parser.add_argument("--dir", default="", help="folder; default: the name")
    parser.add_argument(
        "--base", default="", help="folder of the base model, or its name on the Hugging Face hub"
    )
    args = parser.parse_args(argv)
    with exit_status((InitError, OSError), ()):
        written = write_project(args.name, Path(args.dir or args.name), args.base)
    folder = written[0].parent
    names = ", ".join(path.name for path in written)
    sys.stdout.write(
        f"wrote {names} into {folder}. Next:\n"
        f"  cd {shlex.quote(str(folder))}\n"
        "  journeywork up --config journeywork.toml    # in one terminal, on a machine with a GPU\n"
        "  python agent.py                           # in another\n"
    )


if __name__ == "__main__":
    main()
