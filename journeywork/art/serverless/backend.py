"""The module of ART in which programs find its remote backend."""

from journeywork.art.backend import ServerlessBackend

__all__ = ["ServerlessBackend"]
