"""The settings that every process starts with."""

from pathlib import Path

import pytest

from pipeline.config import ConfigError, load, save
from pipeline.running.resolved import resolve

SERVICES = ("gateway", "sampler", "trainer", "ui")


def test_resolved_settings_are_final(tmp_path: Path) -> None:
    """A service reads from the file what the supervisor has, and nothing is left to resolve."""
    config = load(None, [f"run_dir={tmp_path}", "vllm.device=cuda", "models.0.base=hub/base", "ui.port=8777"])
    resolved = resolve(config, SERVICES)
    save(resolved, tmp_path / "config.toml")
    assert load(tmp_path / "config.toml") == resolved
    assert resolve(resolved, SERVICES) == resolved


def test_what_is_resolved_is_checked(tmp_path: Path) -> None:
    config = load(None, [f"run_dir={tmp_path}"])
    with pytest.raises(ConfigError, match=r"nats: users and nkey_seed are set"):
        resolve(config.replace(nats=config.nats.replace(url="nats://a", users="u", nkey_seed="s")), SERVICES)
    with pytest.raises(TypeError):
        config.nats.replace(adress="nats://a")
