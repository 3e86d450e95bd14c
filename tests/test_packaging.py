"""The contents of the wheel, and the dependencies of the SDK in it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = (
    "torch",
    "vllm",
    "litellm",
    "nats",
    "msgspec",
    "numpy",
    "pyarrow",
    "duckdb",
    "transformers",
    "opentelemetry",
    "rich",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\n")
    for name in filter(None, files):
        if name.startswith(("tests/", "docs/", "benchmarks/", "examples/")) or not (ROOT / name).is_file():
            continue
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(out),
        ".",
    ]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (found,) = out.glob("*.whl")
    return found


def test_the_wheel_holds_every_package_and_its_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packages = ("pipeline", "rollout_gateway", "judge", "trainer", "store", "journeyman")
    wanted = {str(p.relative_to(ROOT)) for package in packages for p in (ROOT / package).rglob("*.py")}
    wanted |= {str(p.relative_to(ROOT)) for p in (ROOT / "judge").rglob("*.md")} | {"journeyman/py.typed"}
    assert wanted <= names
    assert not {n for n in names if n.startswith(("tests", "examples", "benchmarks", "docs"))}


def test_the_wheel_names_the_plugin_that_vllm_loads(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt"))
        points = archive.read(name).decode()
    plugin = "[vllm.general_plugins]\njourneyman_cpu_lora = rollout_gateway.vllm_plugin.register:register\n"
    assert plugin in points


def _requirements(name: str, seen: set[str]) -> set[str]:
    """The distributions that a plain install of `name` brings, itself included."""
    seen.add(name)
    for line in metadata.requires(name) or []:
        needed = (
            line.split(";")[0]
            .split("[")[0]
            .split(">")[0]
            .split("<")[0]
            .split("=")[0]
            .split("!")[0]
            .split("~")[0]
            .strip()
        )
        if ";" not in line and needed not in seen:
            _requirements(needed, seen)
    return seen


def test_the_sdk_runs_with_its_declared_dependencies_only(wheel: Path, tmp_path: Path) -> None:
    """In an environment of only the wheel and what its metadata names, `import journeyman` works and the command says
    what is missing."""
    said = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    needed: set[str] = set()
    for requirement in said:
        _requirements(requirement.split(">")[0], needed)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    for name in needed:
        for file in metadata.files(name) or []:
            if ".." in file.parts or file.suffix == ".pyc":
                continue
            target = tmp_path / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(Path(str(file.locate())).read_bytes())
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import journeyman, journeyman.gathering
heavy = [name for name in {HEAVY!r} if name in sys.modules]
assert not heavy, heavy
assert journeyman.__file__.startswith({str(tmp_path)!r})
from pipeline.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "journeyman: the package msgspec is not installed" in done.stderr
    assert "pip install 'journeyman[cpu]'" in done.stderr
