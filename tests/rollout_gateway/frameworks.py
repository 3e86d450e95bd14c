"""Programs of other people that the gateway's tests run, in `.venv-compat`. Node's packages are there too, so that all
checkouts with this environment share them; `agents/node/node_modules` leads to them."""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.kits.environments import environment, make_once

AGENTS = Path(__file__).parent / "agents"
_NODE = AGENTS / "node"


def compat_bin() -> Path:
    """The folder with `python` and `node`. The first call on a machine takes up to a minute."""
    return environment("compat")


def node() -> Path:
    """The Node program, with the packages of `agents/node` beside its script."""
    bin_folder = compat_bin()
    home = (bin_folder.parent / "node").resolve()  # npm takes no link
    lock = _NODE / "package-lock.json"
    home.mkdir(exist_ok=True)
    options = ("--silent", "--no-audit", "--no-fund", "--ignore-scripts")
    copy = ["cp", str(_NODE / "package.json"), str(lock), str(home)]
    npm = [str(bin_folder / "npm"), "ci", *options, "--prefix", str(home)]
    make_once(home / "node_modules", lock, [copy, npm])
    link = _NODE / "node_modules"
    if not link.is_symlink():
        shutil.rmtree(link, ignore_errors=True)  # of this checkout's own, from before
        with contextlib.suppress(FileExistsError):  # another worker made it
            link.symlink_to(home / "node_modules")
    return bin_folder / "node"


def package(path: str) -> Path:
    """A file of a Node package, installed. `path` may be a pattern."""
    node()
    return next((_NODE / "node_modules").glob(path))


def cli(kind: str, program: str, *turns: str) -> list[str]:
    python = str(compat_bin() / "python")
    script = str(AGENTS / "cli_agent.py")
    return [sys.executable, script, kind, str(node()), str(package(program)), python, *turns]


BIAS = {**dict.fromkeys(("197", "198", "201", "220"), -100), "257": 3}
"""Forbids the white space with which a model that knows no JSON fills it for ever, and makes an end likely to texts
that it would ramble on with."""


def client_environment(opened: dict[str, Any]) -> dict[str, str]:
    """A URL and a key, and `BIAS`."""
    return {
        **os.environ,
        "OPENAI_BASE_URL": opened["base_url"],
        "OPENAI_API_KEY": opened["api_key"],
        "ANTHROPIC_BASE_URL": opened["base_url"].removesuffix("/v1"),  # its clients add that themselves
        "ANTHROPIC_API_KEY": opened["api_key"],
        "AGENT_LOGIT_BIAS": json.dumps(BIAS),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
    }
