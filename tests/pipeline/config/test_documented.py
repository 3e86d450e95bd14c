"""Settings that the pages show can be copied: each TOML snippet of README and docs/ loads."""

import re
import textwrap
from pathlib import Path

import pytest

from pipeline.config import Config, load

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```toml\n(.*?)^```|((?:^    [^\n]*\n|^\n)+)", re.MULTILINE | re.DOTALL)
TABLE = re.compile(rf"^\[\[?({'|'.join(Config.__struct_fields__)})\b[\w.\"/-]*\]\]?", re.MULTILINE)


def snippets() -> list[tuple[str, str]]:
    """Return each fenced TOML block, and each indented one that has a table of settings, with its place."""
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for block in BLOCK.finditer(text):
            toml = block[1] or textwrap.dedent(block[2])
            if block[1] or TABLE.search(toml):
                found.append((f"{page.name}:{text.count(chr(10), 0, block.start()) + 1}", toml))
    return found


@pytest.mark.parametrize(("place", "toml"), snippets())
def test_a_snippet_loads(place: str, toml: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(toml, "utf-8")
    load(tmp_path / "config.toml")


def test_snippets_are_found_in_both_forms() -> None:
    pages = {place.partition(":")[0] for place, _ in snippets()}
    assert {"training.md", "judging.md"} <= pages
