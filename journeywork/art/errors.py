"""What a program of ART can't use here.

Importing this module has an effect: a later import of a module of ART that `journeywork.art` does not have raises an
error which names docs/art.md. `no_attribute` does the same for a name that a module does not have."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Never

_PACKAGE = "journeywork.art"


class UnsupportedError(Exception):
    """The program uses a feature of ART that Journeywork does not have. The message says what to do instead."""


def not_here(name: str) -> str:
    """Return the message about a name of ART's that this package does not have."""
    return f"{name} is not in Journeywork: docs/art.md lists what programs of ART can use, and what differs"


def no_attribute(module: str) -> Callable[[str], Never]:
    """Return the `__getattr__` of a module, which says where to read about a name that the module does not have."""

    def get(name: str) -> Never:
        raise AttributeError(not_here(f"{module}.{name}"))

    return get


class _LastFinder:
    """Finds no module: an import of one that Journeywork does not have says where to read."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: ModuleType | None = None) -> None:
        if name.startswith(f"{_PACKAGE}."):
            raise ImportError(not_here(name))


sys.meta_path.append(_LastFinder)
