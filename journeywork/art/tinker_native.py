"""ART's TinkerNative backend: here an installation trains and serves, as with `LocalBackend`."""

from journeywork.art.local.backend import OtherBackend as TinkerNativeBackend

__all__ = ["TinkerNativeBackend"]
