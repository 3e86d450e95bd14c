"""The design's import rule: services import `pipeline` and never each other; the SDK imports none of them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"pipeline", "rollout_gateway", "judge", "trainer", "store", "journeyman"}
MAY_IMPORT = {
    "pipeline": set(),
    "rollout_gateway": {"pipeline"},
    "judge": {"pipeline"},
    "trainer": {"pipeline"},
    "store": {"pipeline"},
    "journeyman": set(),
}


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found & OURS


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_a_folder_imports_only_what_the_design_allows(folder: str) -> None:
    allowed: set[str] = MAY_IMPORT[folder] | {folder}
    wrong = {str(p.relative_to(ROOT)): imported(p) - allowed for p in (ROOT / folder).rglob("*.py")}
    assert not {path: names for path, names in wrong.items() if names}
