"""A remote installation, by ART's name.

| module | contents |
| --- | --- |
| `backend` | `ServerlessBackend` |
"""

from typing import TYPE_CHECKING

from journeywork.art.refused import refused_parts
from journeywork.art.serverless.backend import ServerlessBackend

if not TYPE_CHECKING:  # it would hide misspelt names from type checkers
    __getattr__ = refused_parts(__name__)

__all__ = ["ServerlessBackend"]
