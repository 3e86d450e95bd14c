"""What a program of ART can't use here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Never

_PACKAGE = "journeywork.art"


class UnsupportedError(Exception):
    """The program uses a feature of ART that Journeywork does not have. The message says what to do instead."""


def sentence(name: str) -> str:
    return f"{name} is not in Journeywork: docs/art.md lists what programs of ART can use, and what differs"


def no_attribute(module: str) -> Callable[[str], Never]:
    """Return a module's `__getattr__`."""

    def get(name: str) -> Never:
        raise AttributeError(sentence(f"{module}.{name}"))

    return get


class _LastFinder:
    """Finds no module: an import of one that Journeywork does not have says where to read."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: ModuleType | None = None) -> None:
        if name.startswith(f"{_PACKAGE}."):
            raise ImportError(sentence(name))


sys.meta_path.append(_LastFinder)
