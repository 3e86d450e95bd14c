"""The error codes in docs/gateway.md are those in the gateway's source, with their statuses."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]


def used(source: str) -> Iterator[tuple[str, int]]:
    """Code and status of each error that is made in `source`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(
                func=ast.Name("ApiError") | ast.Attribute(attr="_reject"),
                args=[ast.Constant(int(status)), ast.Constant(str(code)), *_],
            ):
                yield code, status


def test_the_table_of_errors_is_complete() -> None:
    page = (ROOT / "docs/gateway.md").read_text().partition("\n## Errors\n")[2].partition("\n## ")[0]
    told: dict[str, set[int]] = {}
    for statuses, codes in re.findall(r"^\| ([\d, ]+) \| ([^|]+) \|", page, re.MULTILINE):
        for code in re.findall(r"`([a-z_]+)`", codes):
            told.setdefault(code, set()).update(map(int, re.findall(r"\d{3}", statuses)))
    found: dict[str, set[int]] = {}
    for file in (ROOT / "rollout_gateway").rglob("*.py"):
        for code, status in used(file.read_text()):
            found.setdefault(code, set()).add(status)
    assert len(found) > 40
    assert told.keys() == found.keys()
    assert {code: statuses for code, statuses in found.items() if not statuses <= told[code]} == {}
