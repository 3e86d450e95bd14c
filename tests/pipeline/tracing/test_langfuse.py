"""Rewards and verdicts as Langfuse scores."""

from dataclasses import replace

import msgspec
import pytest

from pipeline.config import NatsConfig
from pipeline.events import GroupScored, Score, Verdict
from pipeline.log.broker import Broker
from pipeline.tracing import langfuse, trace
from pipeline.tracing.exporter import SpanMaker
from tests.kits.langfuse import LangfuseReceiver
from tests.pipeline.tracing.kit import AGENTS_TRACE, SPANS, publish_lives, run_until


async def test_rewards_and_verdicts_become_scores_of_their_spans(
    broker: Broker, nats_config: NatsConfig, receiver: LangfuseReceiver
) -> None:
    await publish_lives(broker)
    await run_until(nats_config, lambda: len(receiver.scores) >= 6 and len(receiver.spans) >= SPANS)
    spans = {s.id: s.name for s in receiver.spans.values()}
    found = {
        (s["traceId"], s["name"]): (s["value"], spans[s["observationId"]], s.get("comment", ""))
        for s in receiver.scores.values()
    }
    said = "it wrote to ann@example.com"
    expected = {}
    for name, reward in ((f"{trace.trace_id('p', 't1'):032x}", 1.0), (AGENTS_TRACE, 0.0)):
        expected |= {
            (name, "reward"): (reward, "invoke_agent m", ""),
            (name, "reward.style"): (reward / 2, "invoke_agent m", ""),
            (name, "judge.default"): (reward, "evaluate", said),
        }
    assert found == expected


async def test_each_vote_on_a_call_is_a_score_of_its_own(broker: Broker) -> None:
    await publish_lives(broker)
    (group,) = await broker.read(GroupScored)
    name = group.event.members[0].trajectory
    votes = tuple(Score(trajectory=name, score=-1.0, call=call) for call in (0, 1))
    verdicts = (Verdict(judge_model="judge/1", rubric="next_state", scores=votes),) * 2
    judged = replace(group, event=msgspec.structs.replace(group.event, verdicts=verdicts))
    _, made = await SpanMaker(broker, True).make(judged)
    found = [score for score in made if score.name == "judge.next_state"]
    assert [(s.metadata["pass"], s.metadata["call"]) for s in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({s.id for s in made}) == len(made)


async def test_a_score_that_is_sent_again_replaces_itself(nats_config: NatsConfig, receiver: LangfuseReceiver) -> None:
    receiver.refuse = 3
    async with Broker.connect(nats_config) as broker:
        await publish_lives(broker)
        (group,) = await broker.read(GroupScored)
    to = langfuse.destination()
    assert to is not None
    for _ in range(2):  # as after a crash before the acknowledgement
        async with Broker.connect(nats_config) as broker:
            _, made = await SpanMaker(broker, True).make(group)
            await langfuse.put(to, made)
    assert (len(receiver.scores), receiver.posts) == (6, 12)


async def test_scores_that_langfuse_refuses_are_logged_and_the_others_of_the_request_written(
    receiver: LangfuseReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    to = langfuse.destination()
    assert to is not None
    score = langfuse.Score(
        id="1", trace_id="t", name="n", value=1.0, data_type="NUMERIC", timestamp="2026-11-20T10:00:00Z"
    )
    refused = msgspec.structs.replace(score, id="2", name="NaN")
    wrong = msgspec.structs.replace(score, data_type="COLOUR")
    many = [msgspec.structs.replace(score, id=str(n)) for n in range(10, 130)]
    for some in (many, [score, refused], [wrong]):
        await langfuse.put(to, some)
    assert (set(receiver.scores), receiver.posts) == ({"1", *(s.id for s in many)}, 121)
    logged = str([getattr(r, "fields", {}) for r in caplog.records])
    assert "no such name" in logged
    assert "COLOUR" in logged
    assert [r.split(":")[0] for r in receiver.rejected] == ["POST /api/public/scores"]
    receiver.rejected.clear()
