"""The contents of the wheel, and the dependencies of the SDK in it."""

from __future__ import annotations

import os
import shutil
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


@pytest.mark.slow
def test_the_wheel_holds_every_package_and_its_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packages = ("pipeline", "rollout_gateway", "judge", "trainer", "store", "journeywork")
    wanted = {str(p.relative_to(ROOT)) for package in packages for p in (ROOT / package).rglob("*.py")}
    wanted |= {str(p.relative_to(ROOT)) for p in (ROOT / "judge").rglob("*.md")} | {"journeywork/py.typed"}
    wanted |= {str(p.relative_to(ROOT)) for p in (ROOT / "journeywork/starter/template").glob("*.*")}
    assert wanted <= names
    assert not {n for n in names if n.startswith(("tests", "examples", "benchmarks", "docs"))}


@pytest.mark.slow
def test_the_wheel_names_the_plugin_that_vllm_loads(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt"))
        points = archive.read(name).decode()
    plugin = "[vllm.general_plugins]\njourneywork_cpu_lora = rollout_gateway.vllm_plugin.register:register\n"
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


@pytest.mark.slow
def test_the_sdk_runs_with_its_declared_dependencies_only(wheel: Path, tmp_path: Path) -> None:
    """In an environment of only the wheel and what its metadata names, `import journeywork` works and the command says
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
import journeywork, journeywork.gathering
heavy = [name for name in {HEAVY!r} if name in sys.modules]
assert not heavy, heavy
assert journeywork.__file__.startswith({str(tmp_path)!r})
from pipeline.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "journeywork: the package msgspec is not installed" in done.stderr
    assert "deploy/make-venv.sh cpu" in done.stderr


PYTHONS = ("3.11", "3.12", "3.13")


def _interpreter(version: str) -> str:
    """The interpreter of a version, from PATH or pyenv. Skips the test where there is none."""
    found = [
        f"python{version}",
        *map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))),
    ]
    for name in reversed(found):
        done = subprocess.run(
            [name, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True, text=True, check=False,
        ) if shutil.which(name) else None  # fmt: skip
        if done is not None and done.stdout.strip() == version:
            return name
    pytest.skip(f"there is no Python {version} on this machine")


def run_pip(*args: str, python: str = sys.executable) -> str:
    """Run pip. Skips the test where no package index can be reached."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "--retries", "1", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    unreachable = ("Temporary failure in name resolution", "NewConnectionError", "Network is unreachable")
    if done.returncode and any(reason in done.stdout + done.stderr for reason in unreachable):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_is_installed_into_an_empty_environment(wheel: Path, tmp_path: Path, version: str) -> None:
    """`pip install` brings what the SDK needs and no more, and the SDK's commands run."""
    subprocess.run([_interpreter(version), "-m", "venv", str(tmp_path / "env")], check=True)
    python = str(tmp_path / "env" / "bin" / "python")
    run_pip("install", "--quiet", str(wheel), python=python)
    installed = {line.partition("==")[0].lower() for line in run_pip("freeze", python=python).splitlines()}
    assert installed <= {
        "anyio", "certifi", "h11", "httpcore", "httpx", "idna", "sniffio", "typing_extensions", *(
            name for name in installed if name.startswith("journeywork")
        ),
    }  # fmt: skip
    script = "import sys, journeywork, journeywork.evaluation; " + (
        f"heavy = [n for n in {(*HEAVY, 'openai')!r} if n in sys.modules]; assert not heavy, heavy; "
        "print(journeywork.Estimate(0.5, 0.4, 0.6, 9))"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    told = subprocess.run(
        [python, "-W", "error", "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout == "0.500 [0.400, 0.600] over 9\n"
    command = str(tmp_path / "env" / "bin" / "journeywork")
    made = subprocess.run([command, "init", "support"], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "support" / "agent.py").is_file()
    shown = subprocess.run([command, "eval", "--help"], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert "https://api.openai.com/v1#gpt-5-mini" in shown.stdout
    missing = subprocess.run([command, "status"], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (missing.returncode, "make-venv.sh cpu" in missing.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["macosx_11_0_arm64", "macosx_11_0_x86_64", "manylinux_2_28_aarch64"])
def test_the_sdk_has_wheels_for_other_machines(wheel: Path, tmp_path: Path, platform: str) -> None:
    run_pip(
        "download", "--quiet", "--only-binary", ":all:", "--platform", platform, "--python-version", PYTHONS[-1],
        "--dest", str(tmp_path), str(wheel),
    )  # fmt: skip
    names = [path.name for path in tmp_path.glob("*.whl")]
    assert len(names) >= 6
    assert all(name.endswith("none-any.whl") for name in names)


@pytest.mark.slow
def test_the_metadata_names_extras_and_versions(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("METADATA")]
        told = archive.read(name).decode()
    for extra in ("cpu", "gpu", "wandb"):
        assert f"Provides-Extra: {extra}\n" in told
    for version in PYTHONS:
        assert f"Classifier: Programming Language :: Python :: {version}\n" in told
    assert "Requires-Python: >=3.11\n" in told


def test_nothing_answers_to_the_former_name() -> None:
    named = subprocess.run(
        ["git", "grep", "-Iil", "journeyman"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    paths = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()

    assert set(named) == {"docs/decisions/0057-journeywork.md", "tests/test_packaging.py"}
    assert [path for path in paths if "journeyman" in path.lower()] == []
