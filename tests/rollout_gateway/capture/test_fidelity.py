"""Whatever a client asks for, the log holds exactly the tokens that vLLM sampled: compared call by call with vLLM."""

import json
from typing import Any

import httpx
import openai
import pytest

from pipeline.events import ExchangeRecorded, unpack_ids, unpack_logprobs, unpack_mask
from pipeline.log.broker import Broker
from tests.conftest import VllmServer
from tests.rollout_gateway.agents.move_tool import MOVE
from tests.rollout_gateway.conftest import GatewayProcess
from tests.rollout_gateway.kit import ASK, direct, exchanges

pytestmark = pytest.mark.vllm

NAMED: Any = {"tools": [MOVE], "tool_choice": {"type": "function", "function": {"name": "move"}}}
SCHEMA = MOVE["function"]["parameters"]
FORMAT: Any = {"response_format": {"type": "json_schema", "json_schema": {"name": "cell", "schema": SCHEMA}}}

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "several choices": {"n": 3},
    "stopped by a string": {"stop": ["=", "a", "b", "x"], "max_tokens": 60},
    "an empty reply": {"logit_bias": {"257": 100}},
    "tokens that end inside a character": {"logit_bias": {str(128 + i): 50 for i in range(0, 100, 7)}},
    "tools left alone": {"tools": [MOVE], "tool_choice": "none"},
    "a tool that must be called": {**NAMED, "max_tokens": 120},
    "a tool that may be called": {"tools": [MOVE], "max_tokens": 40},
    "several calls in one": {
        "tools": [MOVE],
        "tool_choice": "required",
        "max_tokens": 150,
        "parallel_tool_calls": True,
    },
    "an output format": {**FORMAT, "max_tokens": 40},
    "greedy with penalties": {"temperature": 0, "frequency_penalty": 0.5, "top_p": 0.9},
}
ALWAYS_FORCED = ("a tool that must be called", "several calls in one", "an output format")


def joined(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """What a client makes of a stream: text, tool calls and finish reason of each choice."""
    out: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            mine = out.setdefault(choice.index, {"content": "", "tools": {}, "finish": None})
            mine["content"] += choice.delta.content or ""
            mine["finish"] = choice.finish_reason or mine["finish"]
            for call in choice.delta.tool_calls or ():
                tool = mine["tools"].setdefault(call.index, ["", ""])
                tool[0] += (call.function and call.function.name) or ""
                tool[1] += (call.function and call.function.arguments) or ""
    return out


def tools_of(message: dict[str, Any]) -> dict[int, list[str]]:
    calls = message.get("tool_calls") or []
    return {i: [c["function"]["name"], c["function"]["arguments"]] for i, c in enumerate(calls)}


def check_tokens(event: ExchangeRecorded, said: dict[str, Any]) -> None:
    choice = next(c for c in said["choices"] if c["index"] == event.choice)
    assert unpack_ids(event.prompt_ids).tolist() == said["prompt_token_ids"]
    assert unpack_ids(event.sampled_ids).tolist() == choice["token_ids"]
    wanted = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert unpack_logprobs(event.logprobs).tolist() == pytest.approx(wanted, abs=1e-3)
    assert event.finish_reason == choice["finish_reason"]


@pytest.mark.parametrize("case", CASES)
async def test_plain_and_streamed_record_what_was_sampled(
    shared_gateway: GatewayProcess, vllm_server: VllmServer, case: str
) -> None:
    body = {**ASK, "seed": 7, **CASES[case]}
    said = direct(vllm_server, **body)
    passed: Any = {**body, "seed": 7}
    # vLLM words a streamed tool call differently from a plain one; the tokens are the same.
    with openai.OpenAI(base_url=f"{vllm_server.url}/v1", api_key="none") as straight:
        streamed = joined(list(straight.chat.completions.create(**{**passed, "model": "tictactoe@0"}, stream=True)))
    opened = shared_gateway.open()
    client = shared_gateway.agent(opened)
    reply = client.chat.completions.create(**passed)
    chunks = list(client.chat.completions.create(**passed, stream=True, stream_options={"include_usage": True}))
    async with Broker.connect(shared_gateway.config.nats) as broker:
        events = await exchanges(broker, opened["id"])
    n = body.get("n", 1)
    assert [(e.seq, e.choice) for e in events] == [(s, c) for s in (0, 1) for c in range(n)]
    for event in events:
        check_tokens(event, said)
        (recorded,) = json.loads(event.response)["choices"]
        assert recorded["index"] == event.choice
        choice = said["choices"][event.choice] if event.seq == 0 else None
        wanted = (
            (choice["message"]["content"] or "", tools_of(choice["message"]))
            if choice
            else (streamed[event.choice]["content"], streamed[event.choice]["tools"])
        )
        assert (recorded["message"]["content"] or "", tools_of(recorded["message"])) == wanted
    assert joined(chunks) == streamed
    for choice in said["choices"]:
        got = reply.choices[choice["index"]]
        assert got.message.content == choice["message"]["content"]
        assert tools_of(got.message.model_dump()) == tools_of(choice["message"])
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == said["usage"]["completion_tokens"]
    for event in events:
        (recorded,) = json.loads(event.response)["choices"]
        free = event.finish_reason == "stop" and not recorded["message"].get("tool_calls")
        forced = case in ALWAYS_FORCED or (case == "a tool that may be called" and not free)
        assert unpack_mask(event.forced).tolist() == [1] * (len(event.sampled_ids) // 4) * forced


async def test_a_strict_tool_that_is_left_alone_forces_nothing(
    shared_gateway: GatewayProcess, vllm_server: VllmServer
) -> None:
    """The proof: vLLM samples the same, with the same logprobs, as where there is no tool at all."""
    body = {**ASK, "max_tokens": 40, "seed": 3}
    without = direct(vllm_server, **body)
    assert without["choices"][0]["finish_reason"] == "stop"
    opened = shared_gateway.open()
    client = shared_gateway.agent(opened)
    client.chat.completions.create(**body, tools=[MOVE])
    list(client.chat.completions.create(**body, tools=[MOVE], stream=True))
    client.chat.completions.create(**{**body, "max_tokens": 1, "stop": ["zz"]}, tools=[MOVE])
    async with Broker.connect(shared_gateway.config.nats) as broker:
        plain, streamed, cut = await exchanges(broker, opened["id"])
    for event in (plain, streamed):
        check_tokens(event, without)
        assert event.forced == b""
    assert cut.finish_reason == "length"
    assert unpack_mask(cut.forced).tolist() == [1]


async def test_completions_record_what_was_sampled(shared_gateway: GatewayProcess, vllm_server: VllmServer) -> None:
    body: Any = {"prompt": ["a1=x", "b2=o c3"], "n": 2, "max_tokens": 6, "seed": 3, "temperature": 1.0}
    said = httpx.post(
        f"{vllm_server.url}/v1/completions",
        json={**body, "model": "tictactoe@0", "logprobs": 0, "return_token_ids": True},
        timeout=60,
    ).json()
    opened = shared_gateway.open()
    client = shared_gateway.agent(opened)
    reply = client.completions.create(model="tictactoe", **body)
    assert [c.text for c in reply.choices] == [c["text"] for c in said["choices"]]
    assert "token_ids" not in reply.model_dump_json()
    assert all(c.logprobs is None for c in reply.choices)
    with pytest.raises(openai.BadRequestError, match="is not streamed"):
        client.completions.create(model="tictactoe", stream=True, **body)
    with_logprobs = client.completions.create(model="tictactoe", logprobs=2, **body)
    assert all(c.logprobs and c.logprobs.token_logprobs for c in with_logprobs.choices)
    async with Broker.connect(shared_gateway.config.nats) as broker:
        events = await exchanges(broker, opened["id"])
    assert [(e.seq, e.choice) for e in events] == [(s, c) for s in range(2) for c in range(4)]
    for event in events:
        choice = said["choices"][event.choice]
        assert event.endpoint == "/v1/completions"
        assert unpack_ids(event.sampled_ids).tolist() == choice["token_ids"]
        assert unpack_ids(event.prompt_ids).tolist() == choice["prompt_token_ids"]
        wanted = choice["logprobs"]["token_logprobs"]
        assert unpack_logprobs(event.logprobs).tolist() == pytest.approx(wanted, abs=1e-3)
        assert json.loads(event.response)["choices"][0]["text"] == choice["text"]
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tictactoe", prompt="x" * 3000)
