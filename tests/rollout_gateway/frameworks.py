"""Programs of other people that the gateway's tests run: in `.venv-compat`, and Node's packages in
`agents/node/node_modules`."""

from __future__ import annotations

from pathlib import Path

from tests.kits.environments import environment, make_once

AGENTS = Path(__file__).parent / "agents"
_NODE = AGENTS / "node"


def compat_bin() -> Path:
    """The folder with `python` and `node`. The first call on a machine takes up to a minute."""
    return environment("compat")


def node() -> Path:
    """The Node program, with the packages of `agents/node` beside its script."""
    bin_folder = compat_bin()
    options = ("--silent", "--no-audit", "--no-fund", "--ignore-scripts")
    npm = [str(bin_folder / "npm"), "ci", *options, "--prefix", str(_NODE)]
    make_once(_NODE / "node_modules", _NODE / "package-lock.json", [npm])
    return bin_folder / "node"


def package(path: str) -> Path:
    """A file of a Node package, installed."""
    node()
    return _NODE / "node_modules" / path
