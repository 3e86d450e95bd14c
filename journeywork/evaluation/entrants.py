"""Who takes part in an evaluation.

| text | entrant |
| --- | --- |
| `support` | the version that the model's name stands for when the evaluation begins |
| `support@12` | a version |
| `support@0`, `support@base` | the base model |
| `gpt-5` | an outside model of the installation (docs/apprentice.md) |
| `support@12+prompt:FILE` | any of these, with the system prompt in a file, which the rollout takes from `run.prompt` |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from journeywork.trajectory import parse_policy


@dataclass(frozen=True)
class Entrant:
    """A policy version or an outside model."""

    name: str
    """As it was given. Unique in an evaluation."""
    model: str
    """Serving name."""
    version: str = ""
    """Policy version to pin. Empty: the one that the model's name stands for."""
    prompt: str = ""
    """System prompt that the rollout finds in `run.prompt`. Empty: the agent's own."""


def parse_entrant(text: str) -> Entrant:
    """Return the entrant that `text` names. Raises `ValueError` that says what is wrong, and `OSError` for a file that
    can't be read."""
    model, mark, file = text.rpartition("+prompt:")
    if mark:
        return replace(parse_entrant(model), name=text, prompt=Path(file).read_text("utf-8"))
    if "://" in text:
        raise ValueError(
            f"{text!r} is no entrant: give that model to the installation as an outside model ([[outside]], "
            "docs/apprentice.md), and name it here"
        )
    try:
        return Entrant(text, *parse_policy(text))
    except ValueError:
        raise ValueError(f"{text!r} is no entrant: write <model> or <model>@<step>") from None
