"""Slurm, SkyPilot and systemd: the files parse, and every command in them is one that Journeywork has."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.cli import _parser
from pipeline.config import load, with_values
from pipeline.running.plan import make_plan, resolve_max_groups_ahead
from tests.deploy.kit import ROOT

DEPLOY = ROOT / "deploy"

_STUB = """#!/bin/bash
printf '%s\\n' "$(basename "$0") $*" >> "$CALLS"
"""
_SRUN = (
    _STUB
    + """
while [[ "$1" == --* ]]; do
  [[ "$1" == --nodelist=* ]] && echo "on ${1#*=}" >> "$CALLS"
  shift
done
exec "$@"
"""
)
_SCONTROL = "#!/bin/bash\nprintf '%s\\n' n1 n2 n3\n"
_RUNS = _STUB + '[ "$1" = provision ] || exec sleep 300\n'
"""A server of a node: runs until the job ends."""
_CURL = """#!/bin/bash
until grep -q "^journeywork exec" "$CALLS" && grep -q "^journeywork up" "$CALLS"; do sleep 0.02; done
"""
"""The gateway answers when both servers of the first node run."""


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """Slurm's programs and Journeywork's, which note how they are called."""
    programs = {"srun": _SRUN, "scontrol": _SCONTROL, "curl": _CURL}
    for name, text in {
        **programs,
        "submit/.venv/bin/journeywork": _RUNS,
        "submit/.venv/bin/python": _STUB,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def submit(slurm: Path, **env: str) -> subprocess.CompletedProcess[str]:
    given = {
        "PATH": f"{slurm}:{os.environ['PATH']}", "CALLS": str(slurm / "calls"),
        "SLURM_SUBMIT_DIR": str(slurm / "submit"),
        "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4",
    }  # fmt: skip
    argv = ["bash", str(DEPLOY / "slurm.sh"), "/models/base", str(slurm / "run")]
    return subprocess.run(argv, env=given | env, capture_output=True, text=True, timeout=60)


def test_slurm_starts_the_services_on_the_first_node_and_the_trainer_on_the_others(slurm: Path) -> None:
    done = submit(slurm)
    assert done.returncode == 1, (
        done.stderr
    )  # the trainer, a stub, has ended: so does the job, and all that it started
    calls = (slurm / "calls").read_text().splitlines()
    ours = [shlex.split(c)[1:] for c in calls if c.startswith("journeywork ")]
    assert {argv[0] for argv in ours} == {"exec", "provision", "up"}
    for argv in ours:
        _parser().parse_args(argv)
    assert {c for c in calls if c.startswith("on ")} == {"on n1"}
    (torchrun,) = [c for c in calls if c.startswith("python ")]
    assert "--nnodes 2 --nproc-per-node 4" in torchrun
    assert "--rdzv-endpoint n2:29400" in torchrun
    (placed,) = [c for c in calls if c.startswith("srun ") and "torch.distributed.run" in c]
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1 --exclude=n1" in placed
    # The settings are valid, and those of the services belong to the trainer that was started.
    log = load(slurm / "run" / "log.toml")
    config = load(slurm / "run" / "journeywork.toml")
    assert log.nats.users == config.nats.users
    assert log.run_dir != config.run_dir  # `up` wants its own
    assert config.trainer.processes == 8
    assert config.gateway.keys[0].role == "operator"
    as_auto = with_values(config, {"gateway.max_groups_ahead": "auto"})
    assert config.gateway.max_groups_ahead == resolve_max_groups_ahead(as_auto).gateway.max_groups_ahead
    (up,) = [_parser().parse_args(argv) for argv in ours if argv[0] == "up"]
    assert "trainer" not in up.services.split(",")
    again = (slurm / "run" / "operator.key").read_text()
    submit(slurm)
    assert (slurm / "run" / "operator.key").read_text() == again


def test_slurm_needs_a_node_for_the_trainer(slurm: Path) -> None:
    (slurm / "scontrol").write_text("#!/bin/bash\necho n1\n")
    done = submit(slurm)
    assert done.returncode == 2
    assert "on one node run journeywork up" in done.stderr


def test_skypilot_s_file_has_known_fields_and_runs_up() -> None:
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text("utf-8"))
    # The fields of SkyPilot's task, of its documentation.
    assert set(task) <= {
        "name",
        "workdir",
        "num_nodes",
        "resources",
        "envs",
        "secrets",
        "file_mounts",
        "setup",
        "run",
    }
    assert set(task["resources"]) <= {
        "infra",
        "accelerators",
        "cpus",
        "memory",
        "disk_size",
        "ports",
        "use_spot",
        "image_id",
    }
    for script in ("setup", "run"):
        assert subprocess.run(["bash", "-n"], input=task[script], text=True).returncode == 0
    argv = shlex.split(task["run"].replace("\\\n", " ").replace("$MODEL", task["envs"]["MODEL"]))
    args = _parser().parse_args(argv[argv.index("up") :])
    config = load(ROOT / args.config, args.overrides)
    assert config.models[0].base == task["envs"]["MODEL"]
    # Two GPUs: one for vLLM, one for the trainer, so that neither has to share.
    assert argv[0] == "CUDA_VISIBLE_DEVICES=0"
    assert config.vllm.env == {"CUDA_VISIBLE_DEVICES": "1"}


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
