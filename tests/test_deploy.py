"""What `deploy/` and `requirements/` hold: settings that load, a compose file that starts, files that are checked."""

import importlib.metadata
import importlib.util
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline.commands.main import _parser
from pipeline.config import load
from pipeline.running.plan import SERVICES, make_plan, vllm_command

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"


def test_compose_runs_what_up_runs_from_one_image() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]
    assert set(services) == {"prepare", "provision", "nats", "vllm", *SERVICES}
    assert {s["image"] for s in services.values()} == {"journeywork"}
    for name, module in SERVICES.items():
        assert services[name]["entrypoint"][:3] == ["python", "-m", module]
        assert importlib.util.find_spec(module) is not None
    for name in ("nats", "vllm"):
        parsed = _parser().parse_args(services[name]["command"])
        assert parsed.server == name


@pytest.mark.parametrize("settings", ["journeywork.toml", "compose.toml"])
def test_the_settings_of_the_gpu_box_load_and_start_cuda_vllm(settings: str) -> None:
    config = load(DEPLOY / settings, ["models.0.base=/models/base"])
    spec = vllm_command(config, 8000, "0.0.0.0")
    assert "--enforce-eager" not in spec.argv
    assert spec.argv[spec.argv.index("--max-lora-rank") + 1] == str(config.trainer.lora.rank)
    assert "VLLM_CPU_KVCACHE_SPACE" not in spec.env
    assert config.trainer.optimizer.learning_rate is None  # it follows from the size of the model


def test_the_readme_s_line_for_a_gpu_starts_nats_and_vllm_too(tmp_path: Path) -> None:
    line = re.search(r"journeywork (up --config deploy/.*?)\s*#", (ROOT / "README.md").read_text("utf-8"))
    assert line is not None
    args = _parser().parse_args(shlex.split(line.group(1)))
    # The folder with the model is the reader's.
    config = load(ROOT / args.config, [*args.overrides, f"run_dir={tmp_path}", "models.0.base=hub/base"])
    _, processes = make_plan(config, tuple(SERVICES))
    assert [p.name for p in processes][:2] == ["nats", "vllm"]
    assert {p.name for p in processes} >= {"gateway", "judge", "trainer", "store"}


def test_the_image_is_pinned_by_digest_and_runs_without_root() -> None:
    lines = (DEPLOY / "Dockerfile").read_text("utf-8").splitlines()
    assert [line for line in lines if line.startswith("FROM")] == ["FROM ${BASE}"]
    base = next(line for line in lines if line.startswith("ARG BASE="))
    assert re.search("@sha256:[0-9a-f]{64}$", base)
    assert "USER 10001" in lines
    assert any("useradd --uid 10001 " in line for line in lines)
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]
    for service in compose.values():
        assert service["cap_drop"] == ["ALL"]
        assert service.get("user") is None


@pytest.mark.parametrize("lock", ["cpu", "gpu", "compat", "torch-cpu", "source"])
def test_every_package_of_a_lock_has_its_version_and_hashes(lock: str) -> None:
    text = (ROOT / "requirements" / f"{lock}.txt").read_text("utf-8")
    entries = [e for e in re.sub(r"#.*", "", text).replace("\\\n", " ").splitlines() if e.strip()]
    assert len(entries) > (0 if lock in ("torch-cpu", "source") else 30)
    for entry in entries:
        name, *hashes = entry.split()
        assert re.fullmatch(r"[a-z0-9._-]+==[a-z0-9.+_-]+", name, re.IGNORECASE)
        assert hashes
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", h) for h in hashes)


def test_the_lock_holds_what_pyproject_asks_for() -> None:
    """A dependency that was added without `make lock` is missing from a fresh installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [
        r
        for n in ("pipeline", "gateway", "judge", "trainer", "store", "langgraph", "dev")
        for r in extras[n]
        if not r.startswith("journeywork[")
    ] + project["dependencies"]
    text = "".join((ROOT / "requirements" / f"{n}.txt").read_text("utf-8") for n in ("cpu", "torch-cpu", "source"))
    locked = {canonicalize_name(n): v for n, v in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}
    for requirement in map(Requirement, wanted):
        version = locked.get(canonicalize_name(requirement.name))
        assert version, f"{requirement} is in no lock: run `make lock`"
        assert requirement.specifier.contains(version), f"{requirement}, but the lock has {version}"


def test_the_torch_that_is_locked_is_the_torch_that_is_installed() -> None:
    assert f"torch=={importlib.metadata.version('torch')} " in (ROOT / "requirements/torch-cpu.txt").read_text("utf-8")


def test_the_workflows_run_what_ci_runs_on_each_python_with_pinned_actions() -> None:
    workflows = {p.stem: p.read_text("utf-8") for p in (ROOT / ".github/workflows").iterdir()}
    used = [u for text in workflows.values() for u in re.findall(r"uses: (\S+)", text)]
    assert used
    assert all(re.search("@[0-9a-f]{40}$", action) for action in used)
    (job,) = yaml.safe_load(workflows["tests"])["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["classifiers"]
    pythons = [c.rpartition(" ")[2] for c in classifiers if re.search(r":: 3\.\d+$", c)]
    assert job["strategy"]["matrix"]["python"] == pythons
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    run = [make for text in workflows.values() for make in re.findall(r"run: make (\S+)", text)]
    assert set(run) <= targets


def test_npm_packages_have_their_hash() -> None:
    lock = json.loads((ROOT / "tests/rollout_gateway/agents/node/package-lock.json").read_text("utf-8"))
    # What has no version is the empty folder `nothing` of this repository, which stands in for programs that are not
    # wanted.
    packages = {name: p for name, p in lock["packages"].items() if name and not p.get("link")}
    local = {name for name, p in packages.items() if "version" not in p}
    assert all(name.endswith("/nothing") for name in local)
    registry = [p for name, p in packages.items() if name not in local]
    assert registry
    assert all(p["integrity"].startswith("sha512-") for p in registry)
