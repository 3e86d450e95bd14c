"""Calls of outside models: what the provider and the agent get is what they got without the gateway, and each is on the
log with its usage and cost."""

import json
from typing import Any

import anthropic
import httpx
import openai
import pytest

from journeywork import AsyncJourneywork, JourneyworkError, Trajectory
from pipeline.log.broker import Broker
from tests.kits.clients import closed_after_test
from tests.rollout_gateway.access.test_access import Caller
from tests.rollout_gateway.kit import error, exchanges, key_config
from tests.rollout_gateway.outside.conftest import KEY, StartOutside, table
from tests.rollout_gateway.outside.provider import (
    MESSAGE,
    RESPONSE,
    Provider,
    Reply,
    chunks,
    completion,
    message_events,
    response_events,
    stream,
    whole,
)

TOOL = {"type": "object", "properties": {"at": {"type": "string"}}}
IMAGE = "data:image/png;base64,iVBORw0KGgo="
CHAT: Any = {
    "model": "master",
    "temperature": 0.2,
    "reasoning_effort": "high",
    "metadata": {"model": "master"},
    "messages": [
        {"role": "system", "content": 'say "model": "master"'},
        {
            "role": "user",
            "content": [{"type": "text", "text": "grüße"}, {"type": "image_url", "image_url": {"url": IMAGE}}],
        },
    ],
    "tools": [{"type": "function", "function": {"name": "look", "parameters": TOOL}}, {"type": "web_search"}],
}
MESSAGES: Any = {
    "model": "master",
    "max_tokens": 100,
    "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "messages": [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": MESSAGE["content"]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "empty"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
            ],
        },
    ],
    "tools": [{"name": "look", "input_schema": TOOL}, {"type": "web_search_20250305", "name": "web_search"}],
}
RESPONSES: Any = {
    "model": "master",
    "instructions": "be",
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "look"}]},
        *RESPONSE["output"],
        {"type": "function_call_output", "call_id": "call_1", "output": "empty"},
    ],
    "tools": [{"type": "function", "name": "look", "parameters": TOOL}, {"type": "web_search"}],
    "reasoning": {"effort": "high"},
    "prompt_cache_key": "k",
}
DIALECTS: dict[str, tuple[str, Any, Any, list[Any]]] = {
    "chat": ("/chat/completions", CHAT, completion(), chunks()),
    "messages": ("/messages?beta=true", MESSAGES, MESSAGE, message_events()),
    "responses": ("/responses", RESPONSES, RESPONSE, response_events()),
}
_CHANGED = {"host", "content-length", "accept-encoding", "authorization", "x-api-key", "connection"}


def post(url: str, path: str, body: Any, streamed: bool, **headers: str) -> tuple[int, dict[str, str], bytes]:
    body = {**body, "stream": True} if streamed else body
    if streamed and path == "/chat/completions":
        body["stream_options"] = {"include_usage": True}
    encoded = json.dumps(body, ensure_ascii=False).encode()
    headers = {
        "content-type": "application/json",
        "x-api-key": "agent",
        "authorization": "Bearer agent",
        "anthropic-version": "2023-06-01",
        "user-agent": "agent/1",
        "x-stainless-retry-count": "0",
        **headers,
    }
    with httpx.stream("POST", url + path, content=encoded, headers=headers, timeout=60) as reply:
        return reply.status_code, dict(reply.headers), b"".join(reply.iter_raw())


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_bytes_are_those_of_a_direct_call_and_the_record_has_text_usage_and_cost(
    start_outside: StartOutside, provider: Provider, broker: Broker, dialect: Any, streamed: bool
) -> None:
    path, body, answer, events = DIALECTS[dialect]
    more = {"headers": {"x-request-id": "req-1", "x-ratelimit-remaining": "7"}}
    provider.says(stream(*events) if streamed else whole(answer, **more))
    gateway = start_outside(table(provider, dialect=dialect))
    run = gateway.open(model="master")
    direct = post(provider.url, path, {**body, "model": "big"}, streamed)
    through = post(run["base_url"], path, body, streamed, authorization=f"Bearer {run['api_key']}")
    assert through[0] == direct[0] == 200
    assert through[2] == direct[2]
    for name in ("x-request-id", "x-ratelimit-remaining", "content-type", "content-length"):
        assert through[1].get(name) == direct[1].get(name), name
    assert through[1]["x-journeywork-trajectory"] == run["id"]

    first, second = provider.got
    assert second.path == first.path == "/v1" + path
    assert second.body == first.body
    unchanged = {name: value for name, value in first.headers.items() if name not in _CHANGED}
    assert unchanged == {name: value for name, value in second.headers.items() if name not in _CHANGED}
    assert second.headers["x-api-key" if dialect == "messages" else "authorization"].endswith(KEY)
    assert not any(value == "agent" or run["api_key"] in value for value in second.headers.values())

    (event,) = await exchanges(broker, run["id"])
    assert (event.status, event.error, event.policy_version, event.step) == ("complete", "", "outside:master", -1)
    assert (event.prompt_ids, event.sampled_ids, event.logprobs) == (b"", b"", b"")
    assert event.replica == provider.url
    assert event.streamed == streamed
    assert (event.input_tokens, event.cached_tokens, event.output_tokens) == (100, 40, 20)
    written = 10 if dialect == "messages" else 0
    assert event.cost_usd == pytest.approx(((60 - written) * 2.5 + 40 * 1.25 + written * 3.75 + 20 * 10) / 1e6)
    assert event.at > event.started_at > 0
    recorded = json.loads(event.response)
    (choice,) = recorded["choices"]
    assert choice["message"]["content"] == "the answer"
    if dialect != "chat":
        assert recorded["native"] == answer
        assert choice["message"]["reasoning"] == "thought"
    if dialect != "chat" or streamed:
        assert event.finish_reason == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look", {"at": "a1"})
    asked = json.loads(event.request)
    assert asked["model"] == "master"
    assert [m["role"] for m in asked["messages"]][-1] == {"chat": "user", "messages": "user", "responses": "tool"}[
        dialect
    ]
    assert any(tool.get("function", {}).get("name") == "look" for tool in asked["tools"])
    done = gateway.complete(run["id"], reward=1.0).json()
    assert (done["exchanges"], done["calls"]) == (1, 1)


async def test_unmodified_clients(start_outside: StartOutside, provider: Provider, broker: Broker) -> None:
    gateway = start_outside(table(provider), table(provider, dialect="responses"), table(provider, dialect="messages"))
    run = gateway.open(model="master")
    client = gateway.agent(run, max_retries=0)
    ask: Any = {"model": "master", "messages": [{"role": "user", "content": "hi"}]}
    provider.says(whole(completion()))
    assert client.chat.completions.create(**ask).choices[0].message.content == "the answer"
    provider.says(stream(*chunks()))
    seen = list(client.chat.completions.create(**ask, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in seen) == "the answer"
    assert all(chunk.choices for chunk in seen), "the usage is for the gateway"
    assert provider.got[-1].json["stream_options"] == {"include_usage": True}
    provider.says(stream(*response_events()))
    with client.responses.stream(model="master", input="hi") as events:
        assert events.get_final_response().output_text == "the answer"
    repeated = {"x-stainless-retry-count": "1"}
    with client.responses.stream(model="master", input="hi", extra_headers=repeated) as events:
        assert events.get_final_response().output_text == "the answer"
    claude = closed_after_test(
        anthropic.Anthropic(base_url=run["base_url"].removesuffix("/v1"), api_key=run["api_key"], max_retries=0)
    )
    provider.says(stream(*message_events()))
    with claude.messages.stream(model="master", max_tokens=9, messages=ask["messages"]) as events:
        assert events.get_final_message().content[1].text == "the answer"  # type: ignore[union-attr]
    with claude.messages.stream(
        model="master", max_tokens=9, messages=ask["messages"], extra_headers=repeated
    ) as events:
        assert events.get_final_message().content[2].input == {"at": "a1"}  # type: ignore[union-attr]
    assert len(provider.got) == 4, "what is repeated is answered from the log"
    provider.says(whole({"input_tokens": 14}))
    assert claude.messages.count_tokens(model="master", messages=ask["messages"]).input_tokens == 14
    assert provider.got[-1].path == "/v1/messages/count_tokens"
    events_ = await exchanges(broker, run["id"])
    assert [e.status for e in events_] == ["complete"] * 4
    assert [e.output_tokens for e in events_] == [20] * 4
    assert "master" in [model.id for model in client.models.list()]
    assert gateway.client().models.retrieve("master").owned_by == "outside"


async def test_several_choices_share_one_usage(start_outside: StartOutside, provider: Provider, broker: Broker) -> None:
    answer = completion()
    answer["choices"] = [answer["choices"][0] | {"index": i} for i in range(2)]
    provider.says(whole(answer))
    gateway = start_outside(table(provider))
    run = gateway.open(model="master")
    gateway.agent(run).chat.completions.create(model="master", n=2, messages=[{"role": "user", "content": "hi"}])
    first, second = await exchanges(broker, run["id"])
    assert (first.choice, second.choice) == (0, 1)
    assert first.cost_usd
    assert (second.cost_usd, second.input_tokens) == (None, 0)


async def test_detected_runs_and_runs_named_by_headers(
    start_outside: StartOutside, provider: Provider, broker: Broker
) -> None:
    provider.says(whole(MESSAGE))
    gateway = start_outside(table(provider, dialect="messages"), **{"detection.enabled": True})
    first = {**MESSAGES, "messages": MESSAGES["messages"][:1]}
    _, headers, _ = post(f"{gateway.url}/v1", "/messages", first, False)
    _, again, _ = post(f"{gateway.url}/v1", "/messages", MESSAGES, False)
    assert headers["x-journeywork-trajectory"] == again["x-journeywork-trajectory"]
    named = {"x-journeywork-trajectory": "mine", "x-journeywork-group": "g"}
    _, headers, _ = post(f"{gateway.url}/v1", "/messages", first, False, **named)
    assert headers["x-journeywork-trajectory"] == "mine"
    assert len(await exchanges(broker, again["x-journeywork-trajectory"])) == 2
    assert len(await exchanges(broker, "mine")) == 1


async def test_call_that_names_no_run_is_answered_and_not_recorded(
    start_outside: StartOutside, provider: Provider
) -> None:
    provider.says(whole(completion()))
    gateway = start_outside(table(provider))
    status, headers, _ = post(f"{gateway.url}/v1", "/chat/completions", CHAT, False)
    assert status == 200
    assert "x-journeywork-trajectory" not in headers


def test_keys_and_runs_limit_who_may_spend(start_outside: StartOutside, provider: Provider) -> None:
    provider.says(whole(completion()))
    keys = (key_config("all"), key_config("cheap", models=("tictactoe",)))
    gateway = start_outside(table(provider, max_calls=1), keys=keys)
    chat, hi = "/v1/chat/completions", {"model": "master", "messages": []}
    asked = {key: Caller(gateway, key).status("POST", chat, hi) for key in ("all", "cheap", "none")}
    assert asked == {"all": 200, "cheap": 403, "none": 401}
    caller = Caller(gateway, "all")
    opened = caller.open()
    assert Caller(gateway, opened["api_key"]).status("POST", chat, hi) == 400, "the key of a run of another model"
    assert len(provider.got) == 1
    assert caller.status("POST", chat, hi, **{"x-journeywork-trajectory": opened["id"]}) == 200
    refused = caller.ask("POST", "/v1/messages", MESSAGES)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].endswith("Post the call to /v1/chat/completions.")
    assert error(caller.ask("POST", "/tokenize", hi)) == (400, "outside_model")
    assert caller.status("GET", "/v1/groups/g?model=master") == 404


@pytest.mark.parametrize("missing", ["", "with\nbreak"])
def test_key_that_is_missing_ends_the_gateway(
    start_outside: StartOutside, provider: Provider, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setenv("TEST_OTHER_KEY", missing)
    with pytest.raises(RuntimeError, match=r"outside.api_key_env: the environment has no key in TEST_OTHER_KEY"):
        start_outside(table(provider, api_key_env="TEST_OTHER_KEY"))


def test_replies_of_odd_types(start_outside: StartOutside, provider: Provider) -> None:
    gateway = start_outside(table(provider))
    provider.says(Reply(200, [], "text/plain"))
    assert post(f"{gateway.url}/v1", "/chat/completions", CHAT, True)[0] == 200
    provider.says(Reply(301, [], headers={"location": "http://127.0.0.1:1/"}))
    with pytest.raises(openai.InternalServerError):
        gateway.client(max_retries=0).chat.completions.create(model="master", messages=[])


async def test_outside_model_plays_an_evaluation(start_outside: StartOutside, provider: Provider) -> None:
    """Through the gateway, and without a version."""
    gateway = start_outside(table(provider))
    provider.says(whole(completion("b2")))

    async def play(run: Trajectory, task: str) -> float:
        async with openai.AsyncOpenAI(**run.openai) as agent:
            reply = await agent.chat.completions.create(model=run.model, messages=[{"role": "user", "content": task}])
        return float(reply.choices[0].message.content == task)

    async with AsyncJourneywork(gateway.url) as client:
        (result,) = (await client.evaluate(["master"], ["b2", "c3"], play, progress=False)).entrants
        assert (result.version, [task.values["reward"] for task in result.tasks]) == ("", [1.0, 0.0])
        with pytest.raises(JourneyworkError, match="no policy version"):
            await client.record_evaluation(
                {"evaluation": "e", "entrant": "master@1", "model": "master", "version": "master@1"}
            )
