"""Who takes part in an evaluation.

| text | entrant |
| --- | --- |
| `support` | the version that the model's name stands for when the evaluation begins |
| `support@12` | a version |
| `support@0`, `support@base` | the base model |
| `https://host/v1#name` | the model `name` of an OpenAI-compatible server |
| `support@12+prompt:FILE` | any of these, with the system prompt in a file, which the rollout takes from `run.prompt` |
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from journeywork.trajectory import parse_policy


@dataclass(frozen=True)
class Entrant:
    """A policy version, or a model that the gateway does not serve."""

    name: str
    """As it was given. Unique in an evaluation."""
    kind: Literal["policy", "external"]
    model: str
    """Serving name of the policy; for an external entrant, the model's name at its provider."""
    version: str = ""
    """Policy version to pin. Empty: the one that the model's name stands for."""
    url: str = ""
    """Base URL of an external entrant's OpenAI-compatible server, up to `/v1`."""
    key_env: str = ""
    """Environment variable that holds the server's API key."""
    prompt: str = ""
    """System prompt that the rollout finds in `run.prompt`. Empty: the agent's own."""


def add_key_env(parser: argparse.ArgumentParser) -> None:
    """Add `--key-env`, for `parse_entrants`."""
    parser.add_argument("--key-env", default="", metavar="NAME", help="variable with the key of <base URL>#<model>")


def parse_entrants(texts: Iterable[str], key_env: str) -> list[Entrant]:
    """Return the entrants that `texts` name; the key of those that no gateway serves is in the environment variable
    `key_env`. Raises `ValueError` if it is not set, and as `parse_entrant` does."""
    if key_env and not os.environ.get(key_env):
        raise ValueError(f"--key-env {key_env}: this environment variable is not set")
    parsed = [parse_entrant(text) for text in texts]
    return [replace(entrant, key_env=key_env) if entrant.kind == "external" else entrant for entrant in parsed]


def parse_entrant(text: str) -> Entrant:
    """Return the entrant that `text` names. Raises `ValueError` that says what is wrong, and `OSError` for a file that
    can't be read."""
    model, mark, file = text.rpartition("+prompt:")
    if mark:
        return replace(parse_entrant(model), name=text, prompt=Path(file).read_text("utf-8"))
    if text.startswith(("http://", "https://")):
        url, mark, model = text.partition("#")
        if not (mark and model):
            raise ValueError(f"{text!r} names no model: write {url}#<model>")
        return Entrant(text, "external", model, url=url.rstrip("/"))
    try:
        return Entrant(text, "policy", *parse_policy(text))
    except ValueError:
        raise ValueError(f"{text!r} is no entrant: write <model>, <model>@<step> or <url>#<model>") from None
