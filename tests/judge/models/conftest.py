"""Both clients of the judge model."""

from __future__ import annotations

import pytest

from judge.models.openai_client import OpenAiClient


@pytest.fixture(params=["openai", "litellm"])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which client is used, whatever the settings need."""
    monkeypatch.setattr(OpenAiClient, "supports", lambda _: request.param == "openai")
    return str(request.param)
