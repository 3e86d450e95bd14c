"""ART's backend for Megatron: here an installation trains and serves, as with `LocalBackend`."""

from journeywork.art.local.backend import OtherBackend as MegatronBackend
from journeywork.art.refused import refusing

__all__ = ["MegatronBackend"]
__getattr__ = refusing(__name__)
__path__: list[str] = []  # so that an import of one of ART's submodules says what to do instead
