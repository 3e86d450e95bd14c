"""Models that the gateway does not serve, over the inference double as an OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from journeywork.evaluation.endpoint import ExternalClient
from journeywork.evaluation.entrants import parse_entrant
from journeywork.evaluation.playing import play
from journeywork.evaluation.upstreams import _as_stream
from tests.conftest import InferenceDouble
from tests.journeywork.evaluation import kit

pytestmark = pytest.mark.anyio


def entrant(double: InferenceDouble) -> Any:
    return parse_entrant(f"{double.url}/v1#{double.model}@0")


async def test_tokens_and_seconds_of_a_run_are_counted(inference_double: InferenceDouble) -> None:
    client = ExternalClient(entrant(inference_double))
    with client.serving():
        async with client.trajectory("any") as run, openai.AsyncOpenAI(**run.openai) as agent:
            asked: Any = {"model": "any", "max_tokens": 5, "messages": [{"role": "user", "content": "a1=x"}]}
            reply = await agent.chat.completions.create(**asked)
            chunks = [c async for c in await agent.chat.completions.create(**asked, stream=True)]
        key = run.api_key
        refused = httpx.post(
            f"{run.base_url}/chat/completions", json=asked, headers={"authorization": f"Bearer {key}"}
        )
    assert reply.usage is not None
    streamed = chunks[-1].usage
    assert streamed is not None
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].finish_reason in ("stop", "length")
    usage = run.usage
    assert usage is not None
    assert usage.calls == 2
    assert usage.prompt_tokens == 2 * reply.usage.prompt_tokens
    assert usage.completion_tokens == reply.usage.completion_tokens + streamed.completion_tokens
    assert usage.calls_s > 0
    assert refused.status_code == 401  # the run is over


async def test_errors_of_the_server_reach_the_agent(inference_double: InferenceDouble) -> None:
    wrong = parse_entrant(f"{inference_double.url}/v1#nobody")
    client = ExternalClient(wrong)
    with client.serving():
        async with client.trajectory("any") as run, openai.AsyncOpenAI(**run.openai) as agent:
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
            bad = await agent._client.post(
                f"{run.base_url}/x", content=b"[]", headers={"authorization": f"Bearer {run.api_key}"}
            )
            assert bad.status_code == 400


async def test_an_external_entrant_plays_without_a_gateway(inference_double: InferenceDouble) -> None:
    report = await play(None, [entrant(inference_double)], kit.held_out(), kit.play, progress=False)
    (result,) = report.entrants
    assert (result.runs, result.failed, result.usage.calls) == (3, 0, 3)
    assert result.usage.cost_usd is None
    event = report.event(0)
    assert (event["kind"], event["version"]) == ("external", "")
    assert all(task["trajectories"] == () for task in event["tasks"])


def test_a_missing_key_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ValueError, match="the environment variable NO_SUCH_KEY is not set"):
        ExternalClient(replace(parse_entrant("http://h/v1#m"), key_env="NO_SUCH_KEY"))


def test_a_stream_of_one_chunk_has_tool_calls_with_places() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "tool_calls": [call]},
        "finish_reason": "tool_calls",
    }
    text = _as_stream({"object": "chat.completion", "choices": [choice], "usage": {}}).decode()
    assert '"tool_calls": [{"index": 0, "id": "c"' in text
    assert text.endswith("data: [DONE]\n\n")
