"""A receiver of spans and scores."""

import os
from collections.abc import Iterator

import pytest

from pipeline.tracing import backend, langfuse
from tests.kits.langfuse import LangfuseReceiver, run_langfuse
from tests.pipeline.tracing.kit import point_at


@pytest.fixture(autouse=True)
def _no_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("LANGFUSE_", "OTEL_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch, _no_destination: None) -> Iterator[LangfuseReceiver]:
    """A Langfuse that the environment names. It must get no request that Langfuse would reject."""
    monkeypatch.setattr(langfuse, "_RETRY_S", 0.01)
    monkeypatch.setattr(backend, "RETRY_S", 0.05)
    with run_langfuse() as receiver:
        point_at(monkeypatch, receiver)
        monkeypatch.setenv("LANGFUSE_RELEASE", "r-1")
        monkeypatch.setenv("LANGFUSE_TRACING_ENVIRONMENT", "staging")
        yield receiver
    assert receiver.rejected == []
