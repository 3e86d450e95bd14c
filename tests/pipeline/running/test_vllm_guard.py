"""The key in front of vLLM, as an ASGI server calls it; `test_loop` asks a real one."""

from typing import Any

import pytest

from pipeline.running.vllm_guard import RequireKey


async def asked(path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> Any:
    """What the client gets: the status, or `passed` where the server itself was asked."""
    said: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        said.append("passed")

    async def send(message: Any) -> None:
        said.append(message.get("status") or message["type"])

    await RequireKey(app)({"type": kind, "path": path, "headers": list(headers)}, None, send)
    return said[0]


async def test_every_path_but_the_health_page_needs_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-key")
    right, wrong = (b"authorization", b"Bearer sk-key"), (b"authorization", b"Bearer sk-ke")
    for path in ("/v1/models", "/invocations", "/metrics", "/tokenize", "/health/", "//health", "/docs"):
        assert await asked(path) == 401
        assert await asked(path, wrong) == 401
        assert await asked(path, wrong, right) == 401
        assert await asked(path, (b"x", b"y"), right) == "passed"
    assert await asked("/v1/realtime", kind="websocket") == "websocket.close"
    assert await asked("/health") == "passed"
    assert await asked("", kind="lifespan") == "passed"


def test_without_a_key_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="VLLM_API_KEY"):
        RequireKey(lambda *_: None)  # type: ignore[arg-type,return-value]
