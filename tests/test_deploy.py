"""The compose file runs what `journeyman up` runs, with settings that load."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import yaml

from pipeline.cli import _parser
from pipeline.config import load
from pipeline.plan import SERVICES, vllm_command

DEPLOY = Path(__file__).parent.parent / "deploy"


def test_compose_runs_what_up_runs_from_one_image() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]
    assert set(services) == {"nats", "vllm", *SERVICES}
    assert {s["image"] for s in services.values()} == {"journeyman"}
    for name, module in SERVICES.items():
        assert services[name]["entrypoint"][:3] == ["python", "-m", module]
        assert importlib.util.find_spec(module) is not None
    for name in ("nats", "vllm"):
        parsed = _parser().parse_args(services[name]["command"])
        assert parsed.server == name


def test_the_settings_of_the_gpu_box_load_and_start_cuda_vllm() -> None:
    config = load(DEPLOY / "journeyman.toml")
    spec = vllm_command(config, 8000, "0.0.0.0")
    assert "--enforce-eager" not in spec.argv
    assert spec.argv[spec.argv.index("--max-lora-rank") + 1] == str(config.trainer.lora_rank)
    assert "VLLM_CPU_KVCACHE_SPACE" not in spec.env
