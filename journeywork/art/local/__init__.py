"""An installation on this machine.

| module | contents |
| --- | --- |
| `backend` | `LocalBackend`, which joins an installation or starts one |
| `processes` | the process of an installation |
| `copies` | versions and logs in a bucket |
"""

from typing import TYPE_CHECKING

from journeywork.art.local.backend import LocalBackend
from journeywork.art.local.processes import UpError
from journeywork.art.refused import refused_parts

if not TYPE_CHECKING:  # it would hide misspelt names from type checkers
    __getattr__ = refused_parts(__name__)

__all__ = ["LocalBackend", "UpError"]
