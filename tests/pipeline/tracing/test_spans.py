"""The whole tree of multi-turn, judged, trained trajectories, as a receiver gets it, against docs/dashboard.md."""

import json
from pathlib import Path

import pytest

from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from pipeline.tracing import trace
from tests.kits.langfuse import LangfuseReceiver, Span
from tests.pipeline.tracing.kit import AGENTS_SPAN, AGENTS_TRACE, SPANS, START, publish_lives, run_until

DOC = Path(__file__).parents[3] / "docs" / "dashboard.md"
KINDS = {1: "internal", 3: "client"}
NAMES = {"run": "invoke_agent m", "call": "chat m", "verdict": "evaluate"}


def table(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading of docs/dashboard.md."""
    text = DOC.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return rows[2:]


async def exported(nats_config: NatsConfig, receiver: LangfuseReceiver, **settings: str) -> None:
    async with Broker.connect(nats_config) as broker:
        await publish_lives(broker)
    await run_until(nats_config, lambda: len(receiver.spans) >= SPANS, **settings)
    assert len(receiver.spans) == SPANS


def by_row(receiver: LangfuseReceiver, name: str) -> dict[str, list[Span]]:
    """The spans of a trajectory's trace by the names of the documentation's rows."""
    spans = receiver.trace(name)
    assert set(spans) == set(NAMES.values())  # and nothing else is in it
    return {row: spans[span] for row, span in NAMES.items()}


@pytest.mark.parametrize(
    "name", [f"{trace.trace_id('p', 't1'):032x}", AGENTS_TRACE], ids=["own trace", "the agent's trace"]
)
async def test_the_tree_is_the_documented_one(nats_config: NatsConfig, receiver: LangfuseReceiver, name: str) -> None:
    await exported(nats_config, receiver)
    spans = by_row(receiver, name)
    run = spans["run"][0]
    rows = table("The tree")
    assert [row[0] for row in rows] == list(NAMES)
    agents = name == AGENTS_TRACE
    for row, _, below, kind, span_kind, _ in rows:
        for position, span in enumerate(spans[row]):
            assert span.parent == (run.id if below == "run" else AGENTS_SPAN if agents else ""), row
            assert span.attributes["langfuse.observation.type"] == kind
            assert KINDS[span.kind] == span_kind, row
            calls_own = [(AGENTS_TRACE, f"{position + 1:016x}")] if row == "call" and agents else []
            assert span.links == calls_own, row
            assert span.resource["service.name"] == "journeywork"
    assert [len(spans[row]) for row in NAMES] == [1, 2, 1]
    assert (run.start, run.end) == (START * 1000, (START + 30_000_000) * 1000)


@pytest.mark.parametrize("content", ["all", "none"])
async def test_the_attributes_are_the_documented_ones(
    nats_config: NatsConfig, receiver: LangfuseReceiver, content: str
) -> None:
    await exported(nats_config, receiver, content=content)
    rows = [
        (attribute.strip("`"), list(NAMES) if spans == "all" else spans.split(", "), is_content == "yes")
        for _, attribute, spans, is_content, _ in table("Attributes")
    ]
    for row, spans in by_row(receiver, f"{trace.trace_id('p', 't1'):032x}").items():
        expected = {a for a, on, secret in rows if row in on and not (secret and content == "none")}
        for span in spans:
            said = {key for key in span.attributes if ".metadata." not in key}
            assert said == expected, (row, said ^ expected)
    everything = json.dumps([[s.attributes, s.events] for s in receiver.spans.values()])
    scores = json.dumps(list(receiver.scores.values()))
    assert ("ann@example.com" in everything + scores) is (content == "all")
    assert ("it wrote to" in everything + scores) is (content != "none")


async def test_values(nats_config: NatsConfig, receiver: LangfuseReceiver) -> None:
    await exported(nats_config, receiver)
    spans = by_row(receiver, f"{trace.trace_id('p', 't1'):032x}")
    run, call, verdict = spans["run"][0].attributes, spans["call"][1].attributes, spans["verdict"][0]
    assert call["session.id"] == "ticket-12"
    assert call["user.id"] == "u-7"
    assert call["langfuse.trace.tags"] == ["m", "train", "vip"]
    assert call["langfuse.trace.name"] == "find ann@example.com"
    assert call["langfuse.trace.metadata.contact"] == "ann@example.com"
    assert call["langfuse.version"] == call["gen_ai.response.model"] == "m@0"
    assert json.loads(call["langfuse.observation.usage_details"]) == {"input": 2, "output": 1, "total": 3}
    asked = [{"role": "user", "content": "Who is ann@example.com?"}]
    assert json.loads(call["langfuse.observation.input"]) == asked
    for attributes in (call, run):
        reply = json.loads(attributes["langfuse.observation.output"])
        assert reply == {"role": "assistant", "content": "Ann."}
    assert call["langfuse.observation.completion_start_time"] == "2023-11-14T22:13:30.000005Z"
    assert [(name, e["gen_ai.evaluation.score.value"]) for name, e in verdict.events] == [
        ("gen_ai.evaluation.result", 1.0)
    ]
    assert verdict.attributes["langfuse.observation.metadata.reward.style"] == 0.5
