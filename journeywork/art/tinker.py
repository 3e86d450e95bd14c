"""ART's Tinker backend: here an installation trains and serves, as with `LocalBackend`."""

from journeywork.art.local.backend import OtherBackend as TinkerBackend

__all__ = ["TinkerBackend"]
