"""Agents as people write them, each with another client or framework, through the gateway to real vLLM.

Each is a program of its own that knows a base URL and a key, from the variables that its library reads. It plays two
turns of one conversation: a tool call, its result, a text, all streamed. A wire tap between gateway and vLLM holds what
vLLM said; the log must hold the same tokens, call by call.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pipeline.config import NatsConfig
from pipeline.events import ExchangeRecorded, unpack_ids, unpack_logprobs
from pipeline.log.broker import Broker
from tests.conftest import VllmServer
from tests.rollout_gateway.conftest import StartGateway
from tests.rollout_gateway.forcing import forcing
from tests.rollout_gateway.frameworks import AGENTS, cli, client_environment, compat_bin, node
from tests.rollout_gateway.kit import exchanges
from tests.rollout_gateway.tap import tapped

pytestmark = [pytest.mark.anyio, pytest.mark.vllm]


def ours(script: str) -> list[str]:
    return [sys.executable, "-W", "ignore", str(AGENTS / script)]


def theirs(script: str, *args: str) -> list[str]:
    return [str(compat_bin() / "python"), "-W", "ignore", str(AGENTS / script), *args]


PROGRAMS: dict[str, Callable[[], Sequence[str]]] = {
    "openai": lambda: ours("openai_agent.py"),
    "anthropic": lambda: ours("anthropic_agent.py"),
    "litellm": lambda: ours("litellm_agent.py"),
    "openai for Node": lambda: [str(node()), str(AGENTS / "node" / "agent.mjs")],
    "LangGraph": lambda: theirs("langgraph_agent.py"),
    "OpenAI Agents SDK": lambda: theirs("agents_sdk_agent.py"),
    "OpenAI Agents SDK, chat completions": lambda: theirs("agents_sdk_agent.py", "chat_completions"),
    "pydantic-ai": lambda: theirs("pydantic_ai_agent.py"),
}
ENDPOINTS = {"anthropic": "/v1/messages", "OpenAI Agents SDK": "/v1/responses"}


# Agents with long prompts, or with formats of their own that a regular expression holds them to.
LONG_PROGRAMS: dict[str, Callable[[], Sequence[str]]] = {
    "AI SDK": lambda: [str(node()), str(AGENTS / "node" / "ai_sdk.mjs")],
    "smolagents": lambda: theirs("smolagents_agent.py"),
    "dspy": lambda: theirs("dspy_agent.py"),
    "mini-swe-agent": lambda: theirs("mini_swe_agent.py"),
    "Codex CLI": lambda: cli("codex", "@openai/codex/bin/codex.js"),
    "qwen-code": lambda: cli("qwen", "@qwen-code/qwen-code/cli.js"),
}
LONG_ENDPOINTS = {"Codex CLI": "/v1/responses"}
FORCED = ("Codex CLI", "qwen-code")
"""Programs whose settings can't force a tool."""


@pytest.fixture(scope="module")
def long_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """The same model with room for a coding agent's prompt. While developing, JOURNEYWORK_TEST_VLLM_LONG may hold a
    port."""
    given = os.environ.get("JOURNEYWORK_TEST_VLLM_LONG")
    # The model was made for 1,024 positions; beyond them its rotary embedding has to be computed first.
    long = ("--max-model-len", "32768", "--hf-overrides", '{"max_position_embeddings": 32768}')
    server = VllmServer(tmp_path_factory.mktemp("long"), int(given or 0), long)
    if not given:
        server.start()
    yield server
    server.stop()


@pytest.mark.timeout(600)  # the first one installs the frameworks
@pytest.mark.parametrize("name", PROGRAMS)
async def test_an_unmodified_agent_is_captured_token_by_token(
    start_gateway: StartGateway, nats_config: NatsConfig, vllm_server: VllmServer, name: str
) -> None:
    with tapped(vllm_server.url) as tap:
        gateway = start_gateway(urls=(tap.url,))
        opened = gateway.open(id="agent")
        done = subprocess.run(
            PROGRAMS[name](), capture_output=True, text=True, timeout=180, env=client_environment(opened)
        )
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout.strip().splitlines()[-1])  # litellm talks on standard output too
        assert len(said["cells"]) == 2
        assert set(said["cells"]) <= {"a1", "b2"}
        assert said["chunks"] >= 2
        assert gateway.complete("agent", reward=1.0).json()["exchanges"] == 4
        async with Broker.connect(nats_config) as broker:
            events = await exchanges(broker, "agent")
        gateway.stop()
        calls = [call for call in tap.calls if call.streamed]
    assert [(call.status, call.whole) for call in calls] == [(200, True)] * 4
    texts = []
    for event, call in zip(events, calls, strict=True):
        ids, logprobs = call.sampled()
        assert unpack_ids(event.sampled_ids).tolist() == ids != []
        assert unpack_ids(event.prompt_ids).tolist() == call.prompt_ids != []
        assert unpack_logprobs(event.logprobs).tolist() == pytest.approx(logprobs, abs=1e-6)
        assert {event.policy_version} == call.models == {"tictactoe@0"}
        assert (event.status, event.streamed) == ("complete", True)
        assert event.endpoint == ENDPOINTS.get(name, "/v1/chat/completions")
        (choice,) = json.loads(event.response)["choices"]
        texts.append(choice["message"])
    called = [
        json.loads(t["tool_calls"][0]["function"]["arguments"])["cell"] for t in texts if t.get("tool_calls")
    ]
    assert called == said["cells"]
    assert "".join(t["content"] or "" for t in texts) == said["text"]


@pytest.mark.xdist_group("vllm with long prompts")
@pytest.mark.timeout(600)  # the first one installs the programs and starts a vLLM
@pytest.mark.parametrize("name", LONG_PROGRAMS)
async def test_an_unmodified_program_is_captured_token_by_token(
    start_gateway_alone: StartGateway, nats_config: NatsConfig, long_vllm: VllmServer, name: str, tmp_path: Path
) -> None:  # fmt: skip
    with tapped(long_vllm.url) as tap, contextlib.ExitStack() as stack:
        gateway = start_gateway_alone(urls=(tap.url,))
        opened = gateway.open(id="agent")
        env = {
            **client_environment(opened),
            "AGENT_FOLDER": str(tmp_path),
            "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path),
        }
        if name in FORCED:
            bias = json.loads(env["AGENT_LOGIT_BIAS"])
            env["OPENAI_BASE_URL"] = stack.enter_context(forcing(opened["base_url"], "move", bias))
        done = subprocess.run(LONG_PROGRAMS[name](), capture_output=True, text=True, timeout=300, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        said = json.loads(done.stdout.strip().splitlines()[-1])
        assert len(said["cells"]) >= 2
        assert set(said["cells"]) <= {"a1", "b2"}
        recorded = gateway.complete("agent", reward=1.0).json()["exchanges"]
        async with Broker.connect(nats_config) as broker:
            events = await exchanges(broker, "agent")
        gateway.stop()
        calls = [call for call in tap.calls if call.path == "/v1/chat/completions"]
    assert recorded == len(events) == len(calls) >= 2
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
        assert event.endpoint == LONG_ENDPOINTS.get(name, "/v1/chat/completions")
        (choice,) = json.loads(event.response)["choices"]
        texts.append(choice["message"])
    called = [
        json.loads(call["function"]["arguments"])["cell"] for t in texts for call in t.get("tool_calls") or ()
    ]
    assert not called or called == said["cells"]
    if "text" in said:
        assert "".join(t["content"] or "" for t in texts) == said["text"]


@pytest.mark.timeout(600)
async def test_the_tool_runs_of_the_ai_sdk_are_found_whole(
    start_gateway: StartGateway, broker: Broker, vllm_server: VllmServer
) -> None:
    """It writes the arguments of a call again in its own way when it sends them back."""
    gateway = start_gateway(**{"detection.enabled": True})
    env = client_environment({"base_url": f"{gateway.url}/v1", "api_key": "none"})
    done = subprocess.run(LONG_PROGRAMS["AI SDK"](), capture_output=True, text=True, timeout=180, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(done.stdout)["cells"]) == 2
    recorded = [r.event for r in await broker.read(ExchangeRecorded)]
    assert len(recorded) == 4
    assert len({exchange.trajectory for exchange in recorded}) == 1
