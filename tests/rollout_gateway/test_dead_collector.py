"""A trace backend that is away costs no request, and gets every span when it comes."""

from __future__ import annotations

import anyio
import anyio.to_thread
import httpx
import pytest

from pipeline.config import Config, NatsConfig
from pipeline.tracing import backend, exporter
from tests.conftest import free_port
from tests.kits.langfuse import LangfuseReceiver, run_langfuse
from tests.pipeline.tracing.kit import point_at
from tests.rollout_gateway.conftest import PROJECT, StartGateway
from tests.rollout_gateway.fake_vllm import FakeVllm
from tests.rollout_gateway.kit import ASK

pytestmark = pytest.mark.anyio
CALLS = 30


async def test_a_dead_collector_costs_no_request(
    start_gateway_alone: StartGateway,
    fake_vllm: FakeVllm,
    nats_config: NatsConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    point_at(monkeypatch, LangfuseReceiver(f"http://127.0.0.1:{port}"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr(backend, "RETRY_S", 0.05)
    gateway = await anyio.to_thread.run_sync(lambda: start_gateway_alone(urls=(fake_vllm.url,)))
    async with anyio.create_task_group() as tg:
        ready = anyio.Event()
        tg.start_soon(exporter.serve, Config(project=PROJECT, nats=nats_config), lambda **_: ready.set())
        await ready.wait()
        async with httpx.AsyncClient(timeout=60) as client:
            opened = (await client.post(f"{gateway.url}/v1/trajectories", json={"model": "tictactoe"})).json()
            for _ in range(CALLS):
                headers = {"Authorization": f"Bearer {opened['api_key']}"}
                answer = await client.post(
                    f"{opened['base_url']}/chat/completions", json=ASK, headers=headers
                )
                assert answer.status_code == 200, answer.text
            with run_langfuse(port) as receiver, anyio.fail_after(60):
                while len(receiver.spans) < CALLS:
                    await anyio.sleep(0.05)
        tg.cancel_scope.cancel()
    assert {span.name for span in receiver.spans.values()} == {"chat tictactoe"}
