"""The crash points of the services (`pipeline/crash.py`), found in their source."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_SOURCES = "\n".join(
    file.read_text("utf-8")
    for folder in ("pipeline", "rollout_gateway", "judge", "trainer", "store")
    for file in (_ROOT / folder).rglob("*.py")
)
POINTS = tuple(sorted(set(re.findall(r'\bcrash\.point\("(\w+\.\w+)"\)', _SOURCES))))
"""Their names, such as `store.after_commit`, in an order that each run of a seeded test has."""
