"""Rubrics: files that say what a good trajectory is, named in each verdict by their content's hash."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import ConfigError

FOLDER = Path(__file__).parent / "rubrics"
"""Those that come with Journeyman."""


@dataclass(frozen=True)
class Rubric:
    """What a judge is told to look for."""

    name: str
    text: str

    @property
    def hash(self) -> str:
        """Short SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def load_rubric(path: str = "") -> Rubric:
    """The rubric in file `path`, or one of Journeyman's own by its name; empty: the general one.

    Raises `ConfigError` where there is none."""
    file = Path(path) if path else FOLDER / "general.md"
    if not file.exists() and (own := FOLDER / f"{path}.md").exists():
        file = own
    try:
        text = file.read_text("utf-8").strip()
    except OSError as error:
        raise ConfigError(f"judge: no rubric {path}: {error.strerror}") from error
    if not text:
        raise ConfigError(f"judge: the rubric {path} is empty")
    return Rubric(file.stem, text)
