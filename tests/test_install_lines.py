"""Each install line of the docs, and that no other page or message has another one."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.test_packaging import ROOT, run_pip

PAGE = ROOT / "docs" / "install.md"
_LINE = re.compile(r"pip install ('?\.?/?journeywork\b[^`\n]*?)[`\n\"]")
LINES = sorted({line.strip() for line in re.findall(r"`(pip install [^`]+)`", PAGE.read_text("utf-8"))})
WHOLE = ("pip install ./journeywork", "pip install './journeywork[art]'")
"""Lines that are run to their end; of the others, which bring a hundred packages, pip finds what it would install."""


def test_no_page_and_no_message_has_an_install_line_of_its_own() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    texts = {
        name: (ROOT / name).read_text("utf-8")
        for name in files
        if name.endswith((".md", ".py", ".ipynb", ".toml"))
        and not name.startswith(("tests/", "docs/decisions/"))
        and (ROOT / name).is_file()
    }
    others = {
        (name, line)
        for name, text in texts.items()
        for line in _LINE.findall(text)
        if f"pip install {line.strip()}" not in LINES
    }
    assert others == set()
    assert set(WHOLE) < set(LINES)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_install_lines_work_one_after_the_other_in_an_empty_environment(tmp_path: Path) -> None:
    """Each brings more than the one before, so that one environment takes them all."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = str(tmp_path / "env" / "bin" / "python")
    clone = tmp_path / "journeywork"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), str(clone)], check=True)
    # What each line builds of the clone, built once.
    run_pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(clone), python=python)
    (wheel,) = tmp_path.glob("*.whl")
    of_wheel = {line: shlex.split(line)[2].replace("./journeywork", str(wheel)) for line in LINES}
    with ThreadPoolExecutor() as pool:  # what a line would install is searched for while others are installed
        dry = ("install", "--quiet", "--dry-run", "--ignore-installed")
        found = [pool.submit(run_pip, *dry, of_wheel[line], python=python) for line in LINES if line not in WHOLE]
        for line in WHOLE:
            run_pip("install", "--quiet", of_wheel[line], python=python)
            module = "journeywork.art" if "[art]" in line else "journeywork"
            subprocess.run([python, "-W", "error", "-c", f"import {module}"], check=True, cwd=tmp_path)
        for search in found:
            search.result()
