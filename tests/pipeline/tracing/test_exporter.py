"""The telemetry service: destinations by the environment, and a collector that is away or refuses."""

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan

from pipeline.config import Config, ConfigError, NatsConfig
from pipeline.log.broker import Broker
from pipeline.tracing import backend, trace
from pipeline.tracing import exporter as telemetry
from tests.kits.langfuse import LangfuseReceiver
from tests.pipeline.tracing.kit import calls, exchange, run_until


async def test_the_three_variables_of_langfuse_are_enough_and_what_it_refuses_is_sent_again(
    broker: Broker, nats_config: NatsConfig, receiver: LangfuseReceiver
) -> None:
    receiver.refuse, receiver.refuse_status = 2, 404  # an address that a person corrects
    await broker.publish(calls("t1")[0])
    await run_until(nats_config, lambda: len(receiver.spans) == 1)
    path, headers = next(r for r in receiver.requests if "otel" in r[0])
    assert (path, headers["x-langfuse-ingestion-version"]) == ("/api/public/otel/v1/traces", "4")


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ("LANGFUSE_SECRET_KEY=sk", "LANGFUSE_PUBLIC_KEY and LANGFUSE_BASE_URL"),
        (
            "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4317 OTEL_EXPORTER_OTLP_PROTOCOL=grpc",
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'",
        ),
    ],
)
def test_what_can_not_be_used_is_named(monkeypatch: pytest.MonkeyPatch, variables: str, named: str) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("=", 1))
    with pytest.raises(ConfigError, match=named):
        telemetry.check(Config())


def test_opentelemetrys_variables_name_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "support-desk")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=a")
    trace.resource.cache_clear()
    found = trace.resource().attributes
    trace.resource.cache_clear()
    assert (found["service.name"], found["team"]) == ("support-desk", "a")


def test_requests_are_bounded() -> None:
    spans = [ReadableSpan(name=str(i), attributes={"a": "x" * 900_000}) for i in range(5)]
    assert [len(request) for request in backend.split_into_requests(spans)] == [2, 2, 1]


async def test_what_is_too_large_for_the_backend_stops_nothing(
    broker: Broker, nats_config: NatsConfig, receiver: LangfuseReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests are halved. A span that is too large alone is left out, and an error says which."""
    receiver.most_bytes = 8_000
    usual, large = (calls("t1")[0], exchange("t2", 0, "x" * 50_000))
    for event in (*(msgspec.structs.replace(usual, trajectory=f"t{n}") for n in range(10, 20)), large, usual):
        await broker.publish(event)
    await run_until(nats_config, lambda: len(receiver.spans) == 11)
    (refused,) = [r for r in caplog.records if r.getMessage().startswith("the trace backend refused")]
    assert vars(refused)["fields"]["trace"] == f"{trace.trace_id('p', 't2'):032x}"


async def test_of_too_many_trajectories_the_one_that_was_not_used_longest_is_forgotten(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "_REMEMBERED", 2)
    maker = telemetry.SpanMaker(broker, False)
    for name in ("t1", "t2", "t1", "t3"):
        await maker._run("p", name, "g", "m")
    assert list(maker._runs) == [("p", "t1"), ("p", "t3")]
