"""Rubrics: files that say what a good trajectory is. A verdict names its rubric by the hash of the text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import ConfigError, JudgeConfig, RewardConfig

FOLDER = Path(__file__).parent / "rubrics"
"""The rubrics that come with Journeywork."""


@dataclass(frozen=True)
class Rubric:
    """Instructions to a judge."""

    name: str
    text: str

    @property
    def hash(self) -> str:
        """The first 16 digits of the text's SHA-256."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def rubric_of(reward: RewardConfig, config: JudgeConfig) -> Rubric:
    """Return the rubric of a reward whose kind has one. Raises `ConfigError`."""
    return load_rubric(reward.rubric or ("next_state" if reward.kind == "next_state" else config.rubric))


def load_rubric(path: str = "") -> Rubric:
    """Read the rubric file `path`, or the one of Journeywork's own with that name; `general` if `path` is empty.

    Raises `ConfigError` if there is no such file or it is empty."""
    file = Path(path or FOLDER / "general.md")
    if not file.exists() and (built_in := FOLDER / f"{path}.md").exists():
        file = built_in
    try:
        text = file.read_text("utf-8").strip()
    except OSError as error:
        raise ConfigError(f"judge: cannot read the rubric {path}: {error.strerror}") from error
    if not text:
        raise ConfigError(f"judge: the rubric {path} is empty")
    return Rubric(file.stem, text)
