"""Every promise of docs/security.md names a test that exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "security.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)?::(\w+)`")
"""A test with its file, which the tests after it share."""


def test_every_line_names_a_test_that_exists() -> None:
    rows = [
        line
        for line in PAGE.read_text("utf-8").splitlines()
        if line.startswith("| ") and not line.startswith(("| who ", "| ---"))
    ]
    assert rows
    for row in rows:
        named = _TEST.findall(row)
        assert named, f"no test is named: {row}"
        assert len(named) == row.count("::")
        assert named[0][0], f"the first test needs its file: {row}"
        file = ""
        for named_file, test in named:
            file = named_file or file
            tree = ast.parse((ROOT / file).read_text("utf-8"))
            functions = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert test in functions, f"{file} has no {test}"
            assert test.startswith("test_")
