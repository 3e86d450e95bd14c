"""The settings that every process starts with."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import ConfigError, load, save
from pipeline.running.resolved import resolve
from pipeline.running.state import RunState, write_state
from tests.conftest import free_port

SERVICES = ("gateway", "sampler", "trainer", "ui")


def test_resolved_settings_are_final(tmp_path: Path) -> None:
    """A service reads from the file what the supervisor has, and nothing is left to resolve."""
    config = load(None, [f"run_dir={tmp_path}", "vllm.device=cuda", "models.0.base=hub/base", "ui.port=8777"])
    resolved = resolve(config, SERVICES)
    save(resolved, tmp_path / "config.toml")
    assert load(tmp_path / "config.toml") == resolved
    assert resolve(resolved, SERVICES) == resolved


def test_a_dashboard_keeps_its_port_over_restarts_unless_a_setting_names_one(tmp_path: Path) -> None:
    port = free_port()
    write_state(tmp_path, RunState(urls={"ui": f"http://127.0.0.1:{port}"}))
    config = load(None, [f"run_dir={tmp_path}"])
    assert resolve(config, ("ui",)).ui.port == port
    assert resolve(config.replace(ui=config.ui.replace(port=8777)), ("ui",)).ui.port == 8777


def test_what_is_resolved_is_checked(tmp_path: Path) -> None:
    config = load(None, [f"run_dir={tmp_path}"])
    with pytest.raises(ConfigError, match=r"nats: users and nkey_seed are set"):
        resolve(config.replace(nats=config.nats.replace(url="nats://a", users="u", nkey_seed="s")), SERVICES)
    with pytest.raises(TypeError):
        config.nats.replace(adress="nats://a")
