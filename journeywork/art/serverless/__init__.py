"""A remote installation, by ART's name.

| module | contents |
| --- | --- |
| `backend` | `ServerlessBackend`, where ART has it |
"""

from journeywork.art.backend import ServerlessBackend

__all__ = ["ServerlessBackend"]
