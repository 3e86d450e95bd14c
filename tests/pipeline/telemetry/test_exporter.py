"""Traces: a real OTLP/HTTP receiver gets one trace per trajectory, from first call to adapter load."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import anyio
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pipeline.config import Config, ConfigError, NatsConfig
from pipeline.events import (
    CheckpointPublished,
    ExchangeRecorded,
    GroupScored,
    Member,
    PolicyLoaded,
    Score,
    TrajectoryCompleted,
    Verdict,
    now_us,
    pack_ids,
    pack_logprobs,
    pack_seqs,
)
from pipeline.log.broker import Broker
from pipeline.telemetry import exporter as telemetry
from pipeline.telemetry import spans

pytestmark = pytest.mark.anyio


class Receiver:
    """What an OTLP backend got."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.refuse = 0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if receiver.refuse:
                    receiver.refuse -= 1
                    self.send_response(400)
                    self.end_headers()
                    return
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.headers.append({k.lower(): v for k, v in self.headers.items()})
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        receiver.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    receiver = Receiver()
    thread = Thread(target=receiver.server.serve_forever)
    thread.start()
    monkeypatch.setenv("LANGFUSE_HOST", receiver.url)
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", "pk")
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk")
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()
    thread.join()


def exchange(trajectory: str, seq: int) -> ExchangeRecorded:
    return ExchangeRecorded(
        project="p", trajectory=trajectory, seq=seq, model="m", policy_version="m@0", step=0, group="g",
        request=b'{"messages":[{"role":"user","content":"hi"}],"temperature":0.5}', response=b'{"id":"x"}',
        prompt_ids=pack_ids([1, 2]), sampled_ids=pack_ids([3]), logprobs=pack_logprobs([-0.5]), started_at=now_us(),
    )  # fmt: skip


async def life_of_two(broker: Broker) -> None:
    """Two trajectories from first call to the adapter they trained; the second brought a trace of its own."""
    own = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    for trajectory, headers in (("t1", {"traceparent": spans.traceparent("p", "t1")}), ("t2", own)):
        for seq in range(2):
            await broker.publish(exchange(trajectory, seq), headers)
        await broker.publish(
            TrajectoryCompleted(
                project="p", trajectory=trajectory, model="m", group="g", exchanges=2, reward=1.0
            ),
            headers,
        )
    members = tuple(Member(trajectory=t, reward=r) for t, r in (("t1", 1.0), ("t2", 0.0)))
    verdict = Verdict(
        judge_model="j",
        scores=tuple(Score(trajectory=m.trajectory, score=m.reward, explanation="why") for m in members),
    )
    ack = await broker.publish(
        GroupScored(project="p", group="g", model="m", judge="h", members=members, verdicts=(verdict,))
    )
    await broker.publish(
        CheckpointPublished(
            project="p", model="m", step=1, version="m@1", parent="m@0", batch_id="b", groups=("g",),
            group_seqs=pack_seqs([ack.seq]), config_hash="c", adapter="a", adapter_sha256="s", adapter_bytes=1,
            metrics={"loss": 0.1},
        )
    )  # fmt: skip
    await broker.publish(
        PolicyLoaded(project="p", model="m", step=1, version="m@1", replica="r", probe_delta=0.1)
    )


async def run_until(receiver: Receiver, count: int, config: NatsConfig) -> None:
    async with anyio.create_task_group() as tg:
        tg.start_soon(telemetry.serve, Config(nats=config), lambda **_: None)
        with anyio.fail_after(30):
            while len(receiver.spans) < count:
                await anyio.sleep(0.02)
        tg.cancel_scope.cancel()


async def test_one_trace_per_trajectory_from_call_to_adapter_load(
    nats_config: NatsConfig, receiver: Receiver
) -> None:
    async with Broker.connect(nats_config) as broker:
        await life_of_two(broker)
    await run_until(receiver, 12, nats_config)
    assert receiver.headers[0]["x-langfuse-ingestion-version"] == "4"
    assert receiver.headers[0]["authorization"].startswith("Basic ")
    traces: dict[str, list[str]] = {}
    for span in receiver.spans:
        traces.setdefault(span.trace_id.hex(), []).append(span.name)
    expected = ["chat m", "chat m", "evaluate", "invoke_agent m", "load m@1", "train m@1"]
    assert {k: sorted(v) for k, v in traces.items()} == {
        f"{spans.trace_id('p', 't1'):032x}": expected,
        "ab" * 16: expected,
    }
    root = next(s for s in receiver.spans if s.name.startswith("invoke") and s.trace_id.hex() == "ab" * 16)
    assert root.parent_span_id.hex() == "cd" * 8
    for span in receiver.spans:
        if span is not root and span.trace_id == root.trace_id:
            assert span.parent_span_id == root.span_id
    chat = next(s for s in receiver.spans if s.name == "chat m")
    attributes = {a.key: a.value for a in chat.attributes}
    assert attributes["gen_ai.response.model"].string_value == "m@0"
    assert attributes["langfuse.session.id"].string_value == "g"
    verdict = next(s for s in receiver.spans if s.name == "evaluate")
    assert verdict.events[0].name == "gen_ai.evaluation.result"


async def test_what_the_backend_refused_is_sent_again(
    nats_config: NatsConfig,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(telemetry, "RETRY_S", 0.05)
    receiver.refuse = 2
    async with Broker.connect(nats_config) as broker:
        await broker.publish(exchange("t1", 0))
    await run_until(receiver, 1, nats_config)
    assert len(receiver.spans) == 1


def test_half_set_keys_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk")
    monkeypatch.delenv("LANGFUSE_PUBLIC_KEY", raising=False)
    with pytest.raises(ConfigError, match="LANGFUSE_PUBLIC_KEY"):
        telemetry.make_exporter()
