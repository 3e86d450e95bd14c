"""An installation on this machine.

| module | contents |
| --- | --- |
| `backend` | `LocalBackend`, which joins an installation or starts one |
| `copies` | versions and logs in a bucket |
"""

from journeywork.art.local.backend import LocalBackend, UpError

__all__ = ["LocalBackend", "UpError"]
