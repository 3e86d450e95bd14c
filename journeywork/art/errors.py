"""What a program of ART can't use here: an error that names docs/art.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Never


class UnsupportedError(Exception):
    """The program uses a feature of ART that Journeywork does not have. The message says what to do instead."""


def no_attribute(module: str) -> Callable[[str], Never]:
    """Return the `__getattr__` of a module, which says where to read about a name that the module does not have."""

    def get(name: str) -> Never:
        raise AttributeError(
            f"{module}.{name} is not in Journeywork: docs/art.md lists what programs of ART can use, and what differs"
        )

    return get
