"""The question of `journeywork what-if`: which groups, and which variants of the settings."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import Config, ConfigError, load
from pipeline.names import check_name
from pipeline.running.installations import SETTINGS
from store.reading.sql import quoted

_JUDGING = ("judge", "feedback")
_TEACHING = re.compile(r"(models\.\d+\.)?(teacher|trainer\.distill)\b|(models|models\.\d+|(models\.\d+\.)?trainer)$")
"""Names of the settings that teach, and of the tables that may hold them."""


@dataclass(frozen=True)
class Plan:
    """A variant, before it is trained."""

    name: str
    settings: dict[str, Any]
    """What differs, by dotted names."""
    branch: str
    judged: bool
    """Whether its groups have to be judged again. The judge also asks the teacher from outside about them."""

    @property
    def overrides(self) -> list[str]:
        """Its settings as they are written on a command line."""
        return _as_overrides(self.settings)


def _as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return settings, given by dotted names, as texts `section.key=value`."""
    return [f"{name}={v if isinstance(v, str) else json.dumps(v)}" for name, v in settings.items()]


def as_flags(overrides: Iterable[str]) -> list[str]:
    """Return settings, written as `section.key=value`, as arguments of a command."""
    return [part for text in overrides for part in ("--set", text)]


@dataclass(frozen=True)
class Question:
    """What `journeywork what-if` is asked: which groups of which model, and which variants."""

    id: str
    model: str
    index: int
    """The model's place in the settings."""
    selection: str
    """SQL over the view `groups`."""
    start: str
    plans: tuple[Plan, ...]

    @property
    def runs_branch(self) -> str:
        """Branch of the groups as they were, for those that are judged again."""
        return f"what-if-{self.id}-runs"


def read_question(args: argparse.Namespace, config: Config) -> Question:
    """Return the question that the arguments of the command ask about the run with the settings `config`. Raises
    `ConfigError`, `OSError`."""
    names = [model.name for model in config.models]
    model = args.model or names[0]
    if model not in names:
        raise ConfigError(f"--model {model}: the run has {', '.join(names)}")
    conditions = ["split = 'train'", f"model = {quoted(model)}", f"project = {quoted(config.project)}"]
    if args.since:
        conditions.append(f"decided_at >= TIMESTAMP {quoted(args.since.isoformat(sep=' '))}")
    selection = " AND ".join([*conditions, f"({args.where})"])
    start = f"{config.run_dir}#{args.start}" if args.start and "#" not in args.start else args.start
    settings = read_variants(args.rubric, args.settings, args.overrides)
    judged = {}
    for name, given in settings.items():
        variant = load(Path(config.run_dir) / SETTINGS, _as_overrides(given))  # a wrong setting says so now
        if [(m.name, m.base) for m in variant.models] != [(m.name, m.base) for m in config.models]:
            raise ConfigError(
                f"models: the variant {name} has another model or base. A branch is served beside main, by the same "
                "server, so it has main's base. For another one, `journeywork replay` the groups to a run of its own"
            )
        judged[name] = _needs_judging(given, variant)
    about = [selection, start, {name: _with_contents(given) for name, given in settings.items()}]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]
    plans = tuple(
        Plan(name, given, check_name(f"what-if-{digest}-{name}"), judged[name]) for name, given in settings.items()
    )
    return Question(digest, model, names.index(model), selection, start, plans)


def _needs_judging(settings: Mapping[str, Any], variant: Config) -> bool:
    """Return whether a variant's groups have to be judged again: `settings`, in which it differs from the run, are
    about judging, or about a teacher that the judge asks from outside. `variant`: all of its settings."""
    taught = any(variant.trainer_of(model).distill.asks_outside for model in variant.models)
    return any(name.startswith(_JUDGING) or (taught and _TEACHING.match(name)) for name in settings)


def read_variants(rubrics: Sequence[str], files: Sequence[str], overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return what differs in each variant, by its name. Raises `ConfigError`, `OSError`."""
    common: dict[str, Any] = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text!r} is not a setting: write section.key=value")
        common[name.strip()] = value
    variants: list[tuple[str, dict[str, Any]]] = []
    for rubric in rubrics:
        if not Path(rubric).is_file():
            raise ConfigError(f"--rubric {rubric!r}: there is no such file")
        variants.append((Path(rubric).stem, {"judge.rubric": str(Path(rubric).resolve())}))
    for text in files:
        try:
            variants.append((Path(text).stem, dict(_flatten(tomllib.loads(Path(text).read_text("utf-8"))))))
        except ValueError as error:
            raise ConfigError(f"--with {text} is not TOML: {error}") from error
    if not variants and common:
        variants = [("set", {})]
    if not variants:
        raise ConfigError("say what is to differ, with --rubric, --with or --set")
    if len(variants) != len(dict(variants)):
        raise ConfigError("two variants have one name: the names of their files have to differ")
    return {name: common | given for name, given in variants}


def _flatten(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a table by dotted names, as `--set` takes them; a list is one value."""
    for key, value in tree.items():
        name = f'{above}"{key}"' if "." in key else f"{above}{key}"
        if isinstance(value, dict):
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def _with_contents(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the contents of the files that they name, under `files`. They are a part of the question's
    id, because a file with other contents makes it another question."""
    # Not `Path.is_file`, which raises for a text that is longer than any name.
    named = [value for value in settings.values() if isinstance(value, str) and os.path.isfile(value)]  # noqa: PTH113
    return {**settings, "files": {value: Path(value).read_text("utf-8") for value in named}}
