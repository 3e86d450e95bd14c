"""The wheel that is built of the source distribution: its contents, and what each extra brings."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PACKAGES = ("pipeline", "rollout_gateway", "judge", "trainer", "store", "journeywork")
PYTHONS = ("3.11", "3.12", "3.13")


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
    sdist = [sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"]
    subprocess.run(sdist, cwd=source, check=True, capture_output=True)
    (archive,) = out.glob("*.tar.gz")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out))
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(archive)], check=True, capture_output=True)
    (found,) = out.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_holds_every_package_its_data_and_what_pip_and_vllm_read(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        told = {name.rpartition("/")[2]: archive.read(name).decode() for name in names if ".dist-info/" in name}
    wanted = {str(p.relative_to(ROOT)) for package in PACKAGES for p in (ROOT / package).rglob("*.py")}
    wanted |= {str(p.relative_to(ROOT)) for p in (ROOT / "judge").rglob("*.md")}
    wanted |= {"journeywork/py.typed", "pipeline/py.typed"}
    wanted |= {str(p.relative_to(ROOT)) for p in (ROOT / "journeywork/starter/template").glob("*.*")}
    assert wanted <= names
    assert not {n for n in names if n.startswith(("tests", "examples", "benchmarks", "docs"))}
    assert told["entry_points.txt"].split("\n\n") == [
        "[console_scripts]\njourneywork = pipeline.__main__:main",
        "[vllm.general_plugins]\njourneywork_cpu_lora = rollout_gateway.vllm_plugin.register:register\n",
    ]
    assert f"-{_project()['version']}-" in wheel.name
    for page, pattern in (("CHANGELOG.md", r"^## ([\d.]+)"), ("CITATION.cff", r"^version: (.+)")):
        newest = re.search(pattern, (ROOT / page).read_text("utf-8"), re.MULTILINE)
        assert newest is not None
        assert newest.group(1) == _project()["version"], page
    wanted = {f"Provides-Extra: {extra}" for extra in ("cpu", "gpu")} | {"Requires-Python: >=3.11"}
    wanted |= {f"Classifier: Programming Language :: Python :: {version}" for version in PYTHONS}
    assert wanted <= set(told["METADATA"].splitlines())


def _imported(package: str) -> set[str]:
    """The modules that are imported with a package's modules, by their first name; also the loop of a service."""
    names = {"uvloop"} if package == "pipeline" else set()
    for path in (ROOT / package).rglob("*.py"):
        if "vllm_plugin" in path.parts or path.name in ("backup.py", "lake_files.py"):
            continue  # these run in vLLM's environment, and where the store is installed
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
    return names


def _brought(extra: str) -> set[str]:
    """The names of the distributions that `pip install journeywork[extra]` installs, of those that are installed."""
    brought: set[str] = set()
    waiting = [Requirement(f"journeywork[{extra}]")]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        asked = {f"{name}[{e}]" for e in requirement.extras} | {name}
        if asked <= brought:
            continue
        brought |= asked
        try:
            needed = requires(name) or []
        except PackageNotFoundError:
            continue
        for line in needed if name != "journeywork" else _own_requirements():
            other = Requirement(line)
            environments = [{"extra": e} for e in ("", *requirement.extras)]
            if other.marker is None or any(other.marker.evaluate(e) for e in environments):
                waiting.append(other)
    return brought


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def _own_requirements() -> list[str]:
    project = _project()
    extras = project["optional-dependencies"].items()
    return project["dependencies"] + [f'{line}; extra == "{name}"' for name, lines in extras for line in lines]


@pytest.mark.parametrize("package", ["pipeline", "rollout_gateway", "judge", "store", "trainer"])
def test_an_extra_brings_what_its_service_imports(package: str) -> None:
    """Regression: `[judge]`, `[store]` and `[trainer]` could not start a service, because uvloop was missing."""
    brought, distributions = _brought(package.removeprefix("rollout_")), packages_distributions()
    own = {*PACKAGES, *sys.stdlib_module_names}
    missing = {
        name
        for name in (_imported("pipeline") | _imported(package)) - own
        if not brought & {canonicalize_name(d) for d in distributions.get(name, [name])}
    }
    assert not missing
