"""ART's Megatron backend: here an installation trains and serves, as with `LocalBackend`."""

from journeywork.art.local.backend import OtherBackend as MegatronBackend

__all__ = ["MegatronBackend"]
