"""The error codes in docs/gateway.md are those in the gateway's source, with their statuses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
CODE_AT = {"unavailable": 1, "wrong_key": 1, "_reject": 2, "error_body": 2}
"""Functions that make errors, by the place of the code among their arguments."""
STATUS = {"unavailable": 503, "wrong_key": 403}
"""Those of them whose status is always the same. The others take it first, or are told none."""


def used(source: str) -> Iterator[tuple[str, int]]:
    """Code and status of each error that is made in `source`; 0 where the status is not told beside the code."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        codes = [k.value for k in node.keywords if k.arg == "code"]
        codes += node.args[CODE_AT[name] : CODE_AT[name] + 1] if name in CODE_AT else []
        first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else 0
        status = STATUS.get(name, first if isinstance(first, int) else 0)
        for code in codes:
            if isinstance(code, ast.Constant) and isinstance(code.value, str):
                yield code.value, status


def test_the_table_of_errors_is_complete() -> None:
    page = (ROOT / "docs/gateway.md").read_text().partition("\n## Errors\n")[2].partition("\n## ")[0]
    told: dict[str, set[int]] = {}
    for statuses, codes in re.findall(r"^\| ([\d, ]+) \| ([^|]+) \|", page, re.MULTILINE):
        for code in re.findall(r"`([a-z_]+)`", codes):
            told.setdefault(code, set()).update(map(int, re.findall(r"\d{3}", statuses)))
    found: dict[str, set[int]] = {}
    for file in (ROOT / "rollout_gateway").rglob("*.py"):
        for code, status in used(file.read_text()):
            found.setdefault(code, set()).update({status} - {0})
    assert len(found) > 40
    assert told.keys() == found.keys()
    assert {code: statuses for code, statuses in found.items() if not statuses <= told[code]} == {}
