"""Scores of people in Langfuse become labels on the log, each once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from pipeline.config import NatsConfig, TelemetryConfig
from pipeline.events import GroupLabeled
from pipeline.log.broker import Broker
from pipeline.telemetry import trace
from pipeline.telemetry.labels import LabelReader
from pipeline.telemetry.langfuse import Langfuse, destination
from tests.kits.langfuse import LangfuseReceiver, run_langfuse
from tests.pipeline.telemetry.kit import AGENTS_TRACE, SPANS, point_at, publish_lives, run_until

pytestmark = pytest.mark.anyio

T1 = f"{trace.trace_id('p', 't1'):032x}"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[LangfuseReceiver]:
    with run_langfuse() as receiver:
        point_at(monkeypatch, receiver)
        yield receiver
    assert receiver.rejected == []


@asynccontextmanager
async def make_reader(
    nats_config: NatsConfig, config: TelemetryConfig | None = None
) -> AsyncIterator[LabelReader]:
    """A reader as after a start of the service: it knows only what the log holds."""
    to = destination()
    assert to is not None
    async with Broker.connect(nats_config) as broker, Langfuse.connect(to) as langfuse:
        yield LabelReader(broker, langfuse, "p", config or TelemetryConfig())


async def labels(nats_config: NatsConfig) -> list[GroupLabeled]:
    async with Broker.connect(nats_config) as broker:
        return [r.event for r in await broker.read(GroupLabeled)]


@pytest.fixture
async def lives(nats_config: NatsConfig, receiver: LangfuseReceiver) -> None:
    async with Broker.connect(nats_config) as broker:
        await publish_lives(broker)
    await run_until(nats_config, lambda: len(receiver.spans) >= SPANS, labels_every_s=0)


@pytest.mark.usefixtures("lives")
async def test_each_score_is_one_label_also_after_restarts(
    nats_config: NatsConfig, receiver: LangfuseReceiver
) -> None:
    receiver.configs["stars"] = {
        "id": "stars", "name": "stars", "dataType": "NUMERIC", "isArchived": False, "minValue": 1, "maxValue": 5,
    }  # fmt: skip
    receiver.configs["grade"] = {
        "id": "grade", "name": "grade", "dataType": "CATEGORICAL", "isArchived": False,
        "categories": [{"label": "bad", "value": 0}, {"label": "fair", "value": 1}, {"label": "good", "value": 2}],
    }  # fmt: skip
    receiver.annotate(T1, 0.25, comment="too short")
    receiver.annotate(T1, True, "helpful", authorUserId=None)
    receiver.annotate(AGENTS_TRACE, 4, "stars", configId="stars")
    receiver.annotate(AGENTS_TRACE, "fair", "grade", configId="grade", dataType="CATEGORICAL")
    # None of these is a label: without a range, words, of another program's trace, and not a person's.
    receiver.annotate(T1, 7)
    receiver.annotate(T1, "some text", dataType="TEXT")
    receiver.annotate("ff" * 16, 1)
    receiver.annotate(T1, 1.0, subject={"kind": "session", "id": "ticket-12"})
    for number in (4, 0):
        async with make_reader(nats_config) as reader:
            assert await reader.read() == number
            assert await reader.read() == 0
    found = await labels(nats_config)
    assert [(e.labels[0].trajectory, e.labels[0].score, e.labels[0].comment, e.by) for e in found] == [
        ("t1", 0.25, "too short", "annotator-1"), ("t1", 1.0, "", "langfuse"),
        ("t2", 0.75, "", "annotator-1"), ("t2", 0.5, "", "annotator-1"),
    ]  # fmt: skip
    assert {(e.source, e.group, e.model) for e in found} == {("langfuse", "g", "m")}


@pytest.mark.usefixtures("lives")
async def test_a_changed_score_is_a_further_label(
    nats_config: NatsConfig, receiver: LangfuseReceiver
) -> None:
    score = receiver.annotate(T1, 0.25)
    for value in (0.25, 0.5, 0.25):
        score["value"] = value
        async with make_reader(nats_config) as reader:
            await reader.read()
    assert [e.labels[0].score for e in await labels(nats_config)] == [0.25, 0.5, 0.25]


@pytest.mark.usefixtures("lives")
async def test_only_scores_of_the_set_names_are_labels(
    nats_config: NatsConfig, receiver: LangfuseReceiver
) -> None:
    receiver.annotate(T1, 0.25, "tone")
    receiver.annotate(T1, 0.5, "quality")
    async with make_reader(nats_config, TelemetryConfig(label_names=("quality",))) as reader:
        assert await reader.read() == 1


async def test_the_service_reads_labels(nats_config: NatsConfig, receiver: LangfuseReceiver) -> None:
    async with Broker.connect(nats_config) as broker:
        await publish_lives(broker)
        receiver.annotate(T1, 0.25)
        # An annotation may come before the run's span: it is read when the trace is known.
        asked = "/api/public/v3/scores"
        await run_until(
            nats_config,
            lambda: (
                len(receiver.spans) >= SPANS and sum(p.startswith(asked) for p, _ in receiver.requests) > 3
            ),
        )
    assert len(await labels(nats_config)) == 1
