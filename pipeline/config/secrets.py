"""Secrets in settings: which values look like secrets, and references to environment variables.

The settings are saved with every run, so they must not hold secrets. `${NAME}` anywhere in a string is replaced by
an environment variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*)\}")
_SECRET_NAMES = re.compile(r"(?:^|[_-])(?:key|secret|password|token|authorization|cookie)$|credentials?$", re.I)


def plain_secrets(value: Any, where: str) -> Iterator[str]:
    """Yield the dotted names, beginning with `where`, of the strings in `value` that are secrets in plain text: the
    name is that of a secret, such as `api_key`, and the string refers to no environment variable."""
    for name, text in _strings(value, where):
        if not REFERENCE.search(text) and _is_secret(name.rpartition(".")[2], text):
            yield name


def referenced_variables(value: Any) -> Iterator[str]:
    """Yield the environment variables that the strings in `value` refer to."""
    for _, text in _strings(value):
        yield from REFERENCE.findall(text)


def _is_secret(name: str, value: str) -> bool:
    """Return whether a setting of this name, whose value is no reference, holds a secret. Credentials may be a file's
    path, or its content (JSON)."""
    if name.lower().endswith(("credential", "credentials")):
        return value.lstrip().startswith("{")  # else the path of a file
    return bool(value) and _SECRET_NAMES.search(name) is not None


def _strings(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield the strings in `value`, at any depth, each with its dotted name, which begins with `where`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _strings(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner, where)
    elif isinstance(value, str):
        yield where, value
