"""Agents as people write them, each with another client or framework, through the gateway to real vLLM.

Each is a program of its own that knows a base URL and a key, from the variables that its library reads. It plays two
turns of one conversation: a tool call, its result, a text. A wire tap between gateway and vLLM holds what vLLM said;
the log must hold the same tokens, call by call.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pipeline.events import ExchangeRecorded, unpack_ids, unpack_logprobs
from pipeline.log.broker import Broker
from tests.conftest import VllmServer
from tests.rollout_gateway.conftest import LONG, GatewayProcess, shared
from tests.rollout_gateway.frameworks import AGENTS, BIAS, cli, client_environment, compat_bin, node
from tests.rollout_gateway.kit import exchanges
from tests.rollout_gateway.tap import Tap, tapped

pytestmark = [pytest.mark.vllm, LONG]


_SAID: Any = {"name": "said", "strict": True, "schema": {"type": "string", "enum": ["a1 is mine", "b2 is mine"]}}
"""What a forced model may say: a model of 1,024 positions hardly finds an end after thousands."""


def forced(body: dict[str, Any]) -> dict[str, Any]:
    """A call of `/v1/responses` of an agent that can't set what the model must do: call the tool `move`, and say
    something where it got the tool's result. A demo model of 0.8 M parameters would call no tool by itself, and ramble
    on."""
    answered = str(body["input"][-1].get("type")).endswith("_output")
    out = {**body, "logit_bias": BIAS, "temperature": 1.0, "max_output_tokens": 120}
    if answered:
        out["text"] = {"format": {"type": "json_schema", **_SAID}}
    for function in _functions(out["tools"]):
        function["strict"] = True  # or the grammar knows no schema
    out["tool_choice"] = "none" if answered else {"type": "function", "name": "move"}
    return out


def _functions(tools: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for tool in tools:
        yield from _functions(tool.get("tools") or [])
        if tool["type"] == "function":
            yield tool


class Program(NamedTuple):
    command: Callable[[], Sequence[str]]
    endpoint: str = "/v1/chat/completions"
    forced: bool = False
    """Its settings can't force a tool."""


def ours(script: str) -> Program:
    return Program(lambda: [sys.executable, "-W", "ignore", str(AGENTS / script)])


def theirs(script: str, *args: str) -> Program:
    return Program(lambda: [str(compat_bin() / "python"), "-W", "ignore", str(AGENTS / script), *args])


def javascript(script: str) -> Program:
    return Program(lambda: [str(node()), str(AGENTS / "node" / script)])


PROGRAMS = {
    "openai": ours("openai_agent.py"),
    "anthropic": ours("anthropic_agent.py")._replace(endpoint="/v1/messages"),
    "litellm": ours("litellm_agent.py"),
    "openai for Node": javascript("agent.mjs"),
    "AI SDK": javascript("ai_sdk.mjs"),
    "LangGraph": theirs("langgraph_agent.py"),
    "OpenAI Agents SDK": theirs("agents_sdk_agent.py")._replace(endpoint="/v1/responses"),
    "OpenAI Agents SDK, chat completions": theirs("agents_sdk_agent.py", "chat_completions"),
    "Codex CLI": Program(lambda: cli("codex", "@openai/codex/bin/codex.js"), "/v1/responses", forced=True),
}
NAMELESS = "AI SDK"
"""It names no run. It writes the arguments of a call again in its own way when it sends them back."""


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, long_vllm: VllmServer) -> Iterator[tuple[GatewayProcess, Tap]]:
    folder = tmp_path_factory.mktemp("shared")
    with tapped(long_vllm.url) as tap, shared(folder, tap.url, **{"detection.enabled": True}) as gateway:
        yield gateway, tap


@pytest.mark.timeout(600)  # the first one installs the programs and starts a vLLM
@pytest.mark.parametrize("name", PROGRAMS)
async def test_an_unmodified_agent_is_captured_token_by_token(
    front: tuple[GatewayProcess, Tap], name: str, tmp_path: Path
) -> None:
    (gateway, tap), program = front, PROGRAMS[name]
    before = len(tap.calls)
    opened = {"base_url": f"{gateway.url}/v1", "api_key": "none"} if name == NAMELESS else gateway.open()
    env = client_environment(opened) | {"AGENT_FOLDER": str(tmp_path)}
    with contextlib.ExitStack() as stack:
        if program.forced:
            between = stack.enter_context(tapped(gateway.url, forced))
            env["OPENAI_BASE_URL"] = opened["base_url"].replace(gateway.url, between.url)
        done = subprocess.run(program.command(), capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.strip().splitlines()[-1])  # litellm talks on standard output too
    assert len(said["cells"]) >= 2
    assert set(said["cells"]) <= {"a1", "b2"}
    calls = [call for call in tap.calls[before:] if call.path == "/v1/chat/completions"]
    async with Broker.connect(gateway.config.nats) as broker:
        if name == NAMELESS:
            recorded = [r.event.trajectory for r in await broker.read(ExchangeRecorded)]
            (opened["id"],) = {trajectory for trajectory in recorded if trajectory.startswith("i-")}
        events = await exchanges(broker, opened["id"])
    assert gateway.complete(opened["id"], reward=1.0).json()["exchanges"] == len(events) == len(calls) >= 2
    # A program may make several calls at once: each is found by what it sampled.
    events.sort(key=lambda event: event.started_at)
    texts = []
    for event, call in zip(events, calls, strict=True):
        assert (call.status, call.whole) == (200, True)
        ids, logprobs = call.sampled()
        assert unpack_ids(event.sampled_ids).tolist() == ids != []
        assert unpack_ids(event.prompt_ids).tolist() == call.prompt_ids != []
        assert unpack_logprobs(event.logprobs).tolist() == pytest.approx(logprobs, abs=1e-6)
        assert {event.policy_version} == call.models == {"tictactoe@0"}
        assert (event.status, event.streamed) == ("complete", call.streamed)
        assert event.endpoint == program.endpoint
        (choice,) = json.loads(event.response)["choices"]
        texts.append(choice["message"])
    called = [json.loads(c["function"]["arguments"])["cell"] for t in texts for c in t.get("tool_calls") or ()]
    assert not called or called == said["cells"]
    if not program.forced:
        assert (len(calls), len(called), {call.streamed for call in calls}) == (4, 2, {True})
        assert said["chunks"] >= 2
    assert "".join(t["content"] or "" for t in texts) == said["text"]
