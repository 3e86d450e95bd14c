"""Requests other than completions, and tools, bodies and errors with the official clients."""

import json
from typing import Any

import httpx
import pytest

from pipeline.log.broker import Broker
from tests.conftest import VllmServer
from tests.rollout_gateway.conftest import GatewayProcess
from tests.rollout_gateway.dialects.kit import CODEX, NO_SPACE, claude
from tests.rollout_gateway.kit import exchanges

# -- what vLLM answers too ---------------------------------------------------------------------------------------------


@pytest.mark.vllm
async def test_where_vllm_answers_the_gateway_does(gateway: GatewayProcess, vllm_server: VllmServer) -> None:
    opened = gateway.open(id="aside")
    messages = [{"role": "user", "content": "a1=x"}]
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        for path, body in (
            ("/tokenize", {"messages": messages, "return_token_strs": True}),
            ("/tokenize", {"prompt": "b2=o c3"}),
        ):
            wanted = httpx.post(f"{vllm_server.url}{path}", json={"model": "tictactoe@0", **body}).json()
            for prefix in ("", "/t/aside"):
                for model in ("tictactoe", "tictactoe@0"):
                    reply = client.post(prefix + path, json={"model": model, **body})
                    assert (reply.status_code, reply.json()) == (200, wanted)
        assert client.post("/tokenize", json={"model": "nope", "prompt": "x"}).status_code == 404
        for url in (f"{gateway.url}/v1/messages/count_tokens", f"{gateway.url}/t/aside/v1/messages/count_tokens"):
            reply = httpx.post(url, json={"model": "tictactoe", "messages": messages}, timeout=60)
            assert reply.json() == {"input_tokens": 4}
    ask: Any = {"model": "tictactoe", "system": "Play.", "messages": messages}
    counted = claude(gateway, opened).messages.count_tokens(**ask).input_tokens
    used = claude(gateway, opened).messages.create(**ask, max_tokens=2, extra_body={"ignore_eos": True}).usage
    assert (used.input_tokens, used.output_tokens) == (counted, 2)


@pytest.mark.vllm
async def test_errors_of_messages_are_anthropics_whatever_the_prefix(gateway: GatewayProcess) -> None:
    gateway.open(id="a")
    ask = {"model": "tictactoe", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        for prefix in ("", "/t/a", "/t/unheard-of", "/t/" + "x" * 600):
            path = f"{prefix}/v1/messages"
            replies = [
                client.post(path, json={**ask, "model": "nope"}),
                client.post(path, json={**ask, "max_tokens": 100_000}),
                client.post(path, content=b"{not json"),
                client.post(path, json={**ask, "messages": 3}),
                client.get(path),
                client.post(f"{path}/count_tokens", content=b"{not json"),
                client.post(f"{path}/nothing", json=ask),
            ]
            for reply in replies:
                body = reply.json()
                assert reply.status_code >= 400
                assert body["type"] == "error"
                assert set(body["error"]) == {"type", "message"}
                wanted = {400: "invalid_request_error", 404: "not_found_error"}
                assert body["error"]["type"] == wanted.get(reply.status_code, "api_error")


# -- tools of /v1/responses --------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.parametrize("stream", [False, True])
async def test_tools_of_namespaces_are_called_by_their_own_names(
    gateway: GatewayProcess, broker: Broker, stream: bool
) -> None:
    opened = gateway.open(id="codex")
    history: list[Any] = [{"role": "user", "content": "a1=."}]
    body = {
        "model": "tictactoe",
        "tools": CODEX,
        "max_output_tokens": 150,
        "stream": stream,
        **NO_SPACE,
        "tool_choice": {"type": "function", "name": "move"},
    }
    for _ in range(2):
        reply = httpx.post(f"{opened['base_url']}/responses", json={**body, "input": history}, timeout=60)
        assert reply.status_code == 200, reply.text
        assert "web_search, local_shell" in gateway.log
        final = reply.json() if not stream else _last(reply)["response"]
        (call,) = final["output"]
        assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__games", "move")
        assert json.loads(call["arguments"])["cell"] in ("a1", "b2")
        assert final["tools"][1]["tools"][0]["name"] == "move"
        history += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}]
    events = await exchanges(broker, "codex")
    asked = json.loads(events[1].request)
    assert [t["function"]["name"] for t in asked["tools"]] == ["exec", "mcp__games__move", "apply_patch"]
    assert asked["messages"][1]["tool_calls"][0]["function"]["name"] == "mcp__games__move"
    assert all(e.sampled_ids and e.forced for e in events)


def _last(reply: httpx.Response) -> Any:
    return json.loads([line for line in reply.text.splitlines() if line.startswith("data: ")][-1][6:])
