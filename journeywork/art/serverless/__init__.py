"""A remote installation, by ART's name.

| module | contents |
| --- | --- |
| `backend` | `ServerlessBackend` |
"""

from journeywork.art.serverless.backend import ServerlessBackend

__all__ = ["ServerlessBackend"]
