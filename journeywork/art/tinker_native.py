"""ART's backend for Tinker: here an installation trains and serves, as with `LocalBackend`."""

from __future__ import annotations

from typing import Any

from journeywork.art.local import LocalBackend
from journeywork.art.refused import refusing

__getattr__ = refusing(__name__)
__path__: list[str] = []  # so that an import of one of ART's submodules says what to do instead


class TinkerNativeBackend(LocalBackend):
    """As `LocalBackend`. Options beside `path` have no effect."""

    def __init__(self, *, path: str | None = None, **options: Any) -> None:
        super().__init__(path=path)
