"""An installation on this machine.

| module | contents |
| --- | --- |
| `backend` | `LocalBackend`, which joins an installation or starts one |
| `processes` | the process of an installation |
"""

from journeywork.art.local.backend import LocalBackend
from journeywork.art.local.processes import UpError

__all__ = ["LocalBackend", "UpError"]
