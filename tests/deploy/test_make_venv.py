"""`deploy/make-venv.sh`: which Python and installer it takes, and that either installs the same files of the lock."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FAKE = """#!/bin/sh
# Stands in for uv and for a Python {version}: writes down how it is called and makes the folder of an environment.
case "$1 $2" in
  "-c "*) echo "$2" | {python} -c 'import sys; sys.version_info = {tuple}; exec(sys.stdin.read())'; exit $? ;;
  "-m venv"|"venv --quiet") for folder; do :; done; mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python" ;;
esac
case "$0" in */uv) echo "uv $*" ;; *) echo "python $*" ;; esac >> {calls}
"""


def make_venv(tmp_path: Path, *, version: str, uv: bool) -> subprocess.CompletedProcess[str]:
    """Run the script where `python3` is of this version and nothing else but the system's tools is on PATH."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "uname", "touch", "mkdir", "cp", "cat"):
        (tools / name).symlink_to(f"/usr/bin/{name}")
    text = FAKE.format(
        version=version, python="/usr/bin/python3", tuple=tuple(map(int, version.split("."))), calls=tmp_path / "calls"
    )
    for name in ("python3", "uv")[: 1 + uv]:
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    env = {"PATH": str(tools), "PIP_FIND_LINKS": "/wheels"}
    command = ["/bin/bash", str(ROOT / "deploy/make-venv.sh"), "cpu", str(tmp_path / "env")]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the locks are for x86-64")
@pytest.mark.parametrize("uv", [True, False], ids=["uv", "pip"])
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_uv_and_pip_install_every_lock_with_its_hashes(tmp_path: Path, version: str, uv: bool) -> None:
    done = make_venv(tmp_path, version=version, uv=uv)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "env" / ".ready-cpu").exists()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert {call.split()[0] for call in calls} == {"uv" if uv else "python"}
    installs = [call.partition(" install ")[2] for call in calls if " install " in call]
    locks = [line.rpartition("requirements/")[2] for line in installs[:-1]]
    assert locks == ["torch-cpu.txt", "cpu.txt", "source.txt"]
    assert all("--no-deps --require-hashes" in line for line in installs[:-1])
    assert all("--only-binary :all:" in line for line in installs[:2])


@pytest.mark.parametrize("version", ["3.10", "3.14"])
def test_a_python_that_the_lock_is_not_for_is_refused(tmp_path: Path, version: str) -> None:
    done = make_venv(tmp_path, version=version, uv=True)
    assert (done.returncode, "Set PYTHON=/path/to/python3.12" in done.stderr) == (1, True)
    assert not (tmp_path / "env").exists()
