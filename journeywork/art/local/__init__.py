"""An installation on this machine.

| module | contents |
| --- | --- |
| `backend` | `LocalBackend`, which joins an installation or starts one |
| `processes` | the process of an installation |
"""

from journeywork.art.local.backend import LocalBackend as LocalBackend
from journeywork.art.local.processes import UpError as UpError
