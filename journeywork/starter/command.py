"""`journeywork init NAME`: write a starter project: an agent with tasks and a reward, settings, a README and a test.

    journeywork init support && cd support
    journeywork init support --tiny      # with a tiny base model, for two cores without a GPU

The project's README says how to train and how to evaluate.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from journeywork.command_line import command_parser, exit_status

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_PLACEHOLDER = "starter_model"
FILES = ("agent.py", "journeywork.toml", "README.md", "test_agent.py", "pytest.ini")
_BASE, _TINY_BASE = 'base = "Qwen/Qwen3-4B"', 'base = "base"'
"""Lines of the settings. The tiny model is the folder `base` of the project, where `journeywork up` runs."""


class InitError(Exception):
    """The project could not be written. The message says why."""


def write_project(name: str, folder: Path, *, tiny: bool = False) -> list[Path]:
    """Write the project `name` into `folder` and return its files. A `tiny` project has settings for two CPU cores, and
    `make_model.py`, which makes its base model.

    Raises `InitError` if the name cannot be that of a model, or the folder has files already, and `OSError` if it
    can't be made."""
    if not _NAME.fullmatch(name):
        raise InitError(f"{name!r} cannot be a project: use up to 64 letters, digits, `-` and `_`, a letter first")
    template = resources.files("journeywork.starter").joinpath("template")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise InitError(f"{folder} exists and is not empty: choose another name, or a folder with --dir")
    written = []
    for file in (*FILES, *(["make_model.py"] if tiny else [])):
        text = template.joinpath(file).read_text("utf-8").replace(_PLACEHOLDER, name)
        if file == "journeywork.toml" and tiny:
            text = text.replace(_BASE, _TINY_BASE) + template.joinpath("tiny.toml").read_text("utf-8")
        (folder / file).write_text(text, "utf-8")
        written.append(folder / file)
    return written


def make_tiny_model(folder: Path) -> None:
    """Run the project's `make_model.py`. Raises `InitError` if it fails, for want of torch or otherwise."""
    process = subprocess.run([sys.executable, "make_model.py"], cwd=folder, check=False)
    if process.returncode:
        raise InitError(
            f"{folder}/make_model.py failed, and the project has no base model. It needs the services' environment "
            "(docs/install.md): run it there by `python make_model.py`"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Write the project that `argv` (default: the command line) names, and print what to do next. Exits 2 if it cannot
    be written."""
    parser = command_parser("init", __doc__)
    parser.add_argument("name", help="name of the project and of its model")
    parser.add_argument("--dir", default="", help="folder; default: the name")
    parser.add_argument("--tiny", action="store_true", help="make a tiny base model that learns on two cores, no GPU")
    args = parser.parse_args(argv)
    with exit_status((InitError, OSError), ()):
        written = write_project(args.name, Path(args.dir or args.name), tiny=args.tiny)
        if args.tiny:
            make_tiny_model(written[0].parent)
    folder = written[0].parent
    names = ", ".join(path.name for path in written)
    sys.stdout.write(
        f"wrote {names} into {folder}. Next:\n"
        f"  cd {shlex.quote(str(folder))}\n"
        f"  journeywork up --config journeywork.toml    # in one terminal{'' if args.tiny else ', with a GPU'}\n"
        "  python agent.py                             # in another, when it is ready\n"
    )


if __name__ == "__main__":
    main()
