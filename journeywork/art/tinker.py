"""ART's backend for Tinker: here an installation trains and serves, as with `LocalBackend`."""

from journeywork.art.local.backend import OtherBackend as TinkerBackend
from journeywork.art.refused import refusing

__all__ = ["TinkerBackend"]
__getattr__ = refusing(__name__)
__path__: list[str] = []  # so that an import of one of ART's submodules says what to do instead
