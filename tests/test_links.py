"""Links between the pages lead to a file and a heading that exist, and so do mentions of pages in the code, and the
names in CONTRIBUTING.md."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_MENTION = re.compile(r"\bdocs/[\w/-]+\.md\b")


def _tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\n")
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _without_code(page.read_text("utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_links_of_pages_lead_somewhere() -> None:
    broken = []
    for page in _tracked("*.md"):
        for link in _LINK.findall(_without_code(page.read_text("utf-8"))):
            name, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", name):
                continue
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_pages_that_the_code_names_exist() -> None:
    broken = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in _tracked("*.py", "*.toml", "*.yaml", "*.yml", "*Dockerfile", "Makefile", "*.sh")
        for name in _MENTION.findall(file.read_text("utf-8"))
        if not (ROOT / name).is_file()
    ]
    assert broken == []


def test_the_names_that_contributing_tells_are_in_the_code() -> None:
    """A recipe names files and what is to be changed in them; a name that has changed leads its reader nowhere."""
    text = _without_code((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    files = {str(file.relative_to(ROOT)) for file in _tracked()}
    words = set(re.findall(r"\w+", "\n".join(file.read_text("utf-8") for file in _tracked("*.py", "*.toml", "*.html"))))
    missing = []
    for said in re.findall(r"`([^`]+)`", text):
        for part in said.split():
            name = part.rstrip("/")
            if "/" in name or re.search(r"\.(py|toml|html)$", name):
                known = name.startswith("build/") or any(f"/{name}/" in f"/{file}/" for file in files)
            elif re.fullmatch(r"[\w.]+(\(\))?", name):
                known = words.issuperset(re.findall(r"\w+", name))
            else:
                continue
            if not known:
                missing.append(part)
    assert missing == []
