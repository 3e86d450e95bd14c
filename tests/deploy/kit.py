"""What the tests of `deploy/kubernetes` share: overlays with keys, as `kubectl kustomize` renders them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(p.name for p in (KUBERNETES / "overlays").iterdir())

Object = dict[str, Any]


def prepare(overlay: Path) -> None:
    """`python deploy/kubernetes/prepare.py OVERLAY`"""
    argv = [sys.executable, str(KUBERNETES / "prepare.py"), str(overlay)]
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


def prepared(folder: Path, overlay: str, change: Callable[[str], str] = str, more: str = "") -> Path:
    """A copy of `overlay` in `folder`, with keys of its own. `change` makes its settings of those in the tree; `more`:
    further lines of its kustomization."""
    shutil.copytree(KUBERNETES, folder, ignore=shutil.ignore_patterns("prepared"))
    copy = folder / "overlays" / overlay
    settings, kustomization = copy / "journeywork.toml", copy / "kustomization.yaml"
    settings.write_text(change(settings.read_text("utf-8")))
    kustomization.write_text(kustomization.read_text("utf-8") + more)
    prepare(copy)
    return copy


def render(overlay: Path) -> list[Object]:
    """The objects of an overlay that is prepared."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl, which has Kustomize, is not in PATH")
    done = subprocess.run([kubectl, "kustomize", str(overlay)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [o for o in yaml.safe_load_all(done.stdout) if o]


def pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """The name of each workload, and the template of its pods."""
    for found in objects:
        kind, name, spec = found["kind"], found["metadata"]["name"], found.get("spec", {})
        if kind in ("Deployment", "StatefulSet", "Job"):
            yield name, spec["template"]
        elif kind == "JobSet":
            for job in spec["replicatedJobs"]:
                yield name, job["template"]["spec"]["template"]


def named(objects: list[Object], kind: str, name: str) -> Object:
    return next(o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name)


def content(objects: list[Object], kind: str, name: str) -> dict[str, str]:
    """The files of a ConfigMap or a Secret."""
    found = named(objects, kind, name)
    return dict(found.get("data") or found.get("stringData") or {})
