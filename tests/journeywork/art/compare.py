"""Runs the compatibility suite against `art` itself and against `journeywork.art`, and records both results.

    python -m tests.journeywork.art.compare                 # makes build/art-venv with openpipe-art, about 1 GB
    python -m tests.journeywork.art.compare --python PATH   # an environment that has openpipe-art and pytest already

Both runs use the same interpreter, so they have the same version of every library. It writes compatibility.json beside
this file, and ends with status 1 if the results differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).parents[3]
SUITE = Path(__file__).with_name("compatibility")
RESULT = Path(__file__).with_name("compatibility.json")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PACKAGES = (
    "openpipe-art==0.5.18",
    "openai==2.54.0",
    "langgraph>=1.0",
    "langchain-openai>=1.0",
    "pytest>=9.2",
    "pyarrow",
    *EXTRAS["pipeline"],
    "psutil>=7.2",
)
"""OpenAI's client before 3.0: openpipe-art listens to httpx, and later clients bring another library. The last ones are
what our judge needs besides."""


def environment(folder: Path) -> Path:
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "-q", *PACKAGES], check=True)
    return python


def outcomes(python: Path, package: str) -> dict[str, str]:
    """The outcome of each case. The suite is copied away from this repository's `conftest.py` files."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        copy = shutil.copytree(SUITE, Path(folder) / SUITE.name, ignore=shutil.ignore_patterns("__pycache__"))
        env = {**os.environ, "ART_UNDER_TEST": package, "PYTHONPATH": str(ROOT)}
        command = [
            str(python),
            "-m",
            "pytest",
            "-q",
            "-c",
            os.devnull,
            "--rootdir",
            folder,
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            str(copy),
        ]
        subprocess.run(command, cwd=folder, env=env)
        cases = ET.parse(report).getroot().iter("testcase")
        return {case.get("name", ""): next((child.tag for child in case), "passed") for case in cases}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", type=Path)
    python = parser.parse_args().python or environment(ROOT / "build" / "art-venv")
    theirs, ours = outcomes(python, "art"), outcomes(python, "journeywork.art")
    differing = {
        name: [theirs.get(name), ours.get(name)] for name in theirs | ours if theirs.get(name) != ours.get(name)
    }
    versions = json.loads(
        subprocess.run(
            [
                str(python),
                "-c",
                "import json; from importlib.metadata import version as v; "
                "print(json.dumps({n: v(n) for n in ('openpipe-art', 'openai', 'langgraph')}))",
            ],
            check=True,
            capture_output=True,
        ).stdout
    )
    result = {
        "versions": versions,
        "cases": len(theirs),
        "passed against art": sum(outcome == "passed" for outcome in theirs.values()),
        "passed against journeywork.art": sum(outcome == "passed" for outcome in ours.values()),
        "differing": differing,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(RESULT.read_text())
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
