"""The options of the inference engine, where ART defines them."""

from journeywork.art.dev import EngineArgs
from journeywork.art.refused import refusing

__getattr__ = refusing(__name__)
__all__ = ["EngineArgs"]
