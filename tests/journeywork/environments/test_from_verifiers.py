"""Versions of verifiers that can't be used are told with what to do. `test_command` plays a real environment."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from journeywork.environments.from_verifiers import VerifiersScenarios
from journeywork.environments.scenarios import ScenarioError


def test_a_version_without_load_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = ModuleType("verifiers")
    newer.__version__ = "0.4.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", newer)
    with pytest.raises(
        ScenarioError, match=r"verifiers 0\.4\.0 is installed, .* 0\.1\.12 to 0\.3\.0 are supported"
    ):
        VerifiersScenarios("gsm8k", {}, {})


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ScenarioError, match=r"not installed .* pip install '\./journeywork\[verifiers\]'"):
        VerifiersScenarios("gsm8k", {}, {})
