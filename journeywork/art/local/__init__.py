"""An installation on this machine.

| module | contents |
| --- | --- |
| `backend` | `LocalBackend`, which joins an installation or starts one |
"""

from journeywork.art.local.backend import LocalBackend, UpError

__all__ = ["LocalBackend", "UpError"]
