"""Each install line of the docs, that no other page or message has another one, and that the SDK is installed with what
it needs and no more."""

import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.test_packaging import ROOT

PAGE = ROOT / "docs" / "install.md"
_LINE = re.compile(r"pip install ('?\.?/?journeywork\b[^`\n]*?)[`\n\"]")
LINES = sorted({line.strip() for line in re.findall(r"`(pip install [^`]+)`", PAGE.read_text("utf-8"))})
WHOLE = ("pip install ./journeywork", "pip install './journeywork[art]'")
"""Lines that are run to their end; of the others, which bring a hundred packages, pip finds what it would install."""


NEEDED = {"anyio", "certifi", "h11", "httpcore", "httpx", "idna", "sniffio", "typing_extensions"}
HEAVY = "torch vllm litellm nats msgspec numpy pyarrow duckdb transformers opentelemetry rich openai"


def run_pip(python: str, *args: str) -> str:
    """Run pip. Skips the test where no package index can be reached."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "--timeout", "60", "--retries", "3", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    unreachable = ("Temporary failure in name resolution", "NewConnectionError", "Network is unreachable")
    if done.returncode and any(reason in done.stdout + done.stderr for reason in unreachable):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
    programs = tmp_path / "env" / "bin"
    pip, clone = partial(run_pip, str(programs / "python")), tmp_path / "journeywork"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), str(clone)], check=True)
    # What each line builds of the clone, built once.
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(clone))
    (wheel,) = tmp_path.glob("*.whl")
    of_wheel = {line: shlex.split(line)[2].replace("./journeywork", str(wheel)) for line in LINES}
    with ThreadPoolExecutor() as pool:  # what a line would install is searched for while others are installed
        dry = ("install", "--quiet", "--dry-run", "--ignore-installed")
        found = [pool.submit(pip, *dry, of_wheel[line]) for line in LINES if line not in WHOLE]
        pip("install", "--quiet", of_wheel[WHOLE[0]])
        installed = {line.partition("==")[0].lower() for line in pip("freeze").splitlines()}
        assert {name for name in installed if not name.startswith("journeywork")} <= NEEDED
        check_sdk(programs, tmp_path)
        pip("install", "--quiet", of_wheel[WHOLE[1]])
        subprocess.run([programs / "python", "-W", "error", "-c", "import journeywork.art"], check=True, cwd=tmp_path)
        for search in found:
            search.result()


def check_sdk(programs: Path, folder: Path) -> None:
    """The SDK imports nothing heavy, and its commands run."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(program: str, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([programs / program, *args], env=env, cwd=folder, capture_output=True, text=True)

    heavy = f"[name for name in {HEAVY.split()} if name in sys.modules]"
    script = f"import sys, journeywork.evaluation as e, journeywork as j; print({heavy}, j.Estimate(0.5, 0.4, 0.6, 9))"
    assert run("python", "-W", "error", "-c", script).stdout == "[] 0.500 [0.400, 0.600] over 9\n"
    assert run("journeywork", "init", "support").returncode == 0
    assert (folder / "support" / "agent.py").is_file()
    assert "journeywork eval support@0 support@12 gpt-5" in run("journeywork", "eval", "--help").stdout
    missing = run("journeywork", "status")
    assert (missing.returncode, "make-venv.sh cpu" in missing.stderr) == (2, True)
