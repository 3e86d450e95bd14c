"""systemd: its unit is valid, and its command is one that Journeywork has."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.commands.main import _parser
from pipeline.config import load
from pipeline.running.plan import make_plan
from tests.deploy.kit import ROOT

DEPLOY = ROOT / "deploy"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "journeywork.service").read_text("utf-8")
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, *argv = shlex.split(command)
    args = _parser().parse_args(argv)
    (state,) = re.findall(r"^StateDirectory=(.*)$", text, re.MULTILINE)
    assert args.run_dir.startswith(f"/var/lib/{state}/")  # all else is read-only
    # The processes get their time to stop.
    (stop,) = re.findall(r"^TimeoutStopSec=(.*)$", text, re.MULTILINE)
    config = load(DEPLOY / "journeywork.toml", ["models.0.base=hub/base"])
    _, specs = make_plan(config, ("gateway", "sampler", "judge", "trainer", "store", "ui"))
    assert float(stop) >= max(s.stop_grace_s for s in specs) * 3  # they end in stages: gateway, services, log
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not in PATH")
    unit = tmp_path / "journeywork.service"
    unit.write_text(text.replace(program, sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
