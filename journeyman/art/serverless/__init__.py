"""A remote installation, by ART's name.

| module | contents |
| --- | --- |
| `backend` | `ServerlessBackend` |
"""

from journeyman.art.serverless.backend import ServerlessBackend

__all__ = ["ServerlessBackend"]
