"""Programs that keep a thinking model's thoughts between tool calls: each turn's prompts are those of a chat completion
with `reasoning_content`, and its calls one training sequence."""

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from pipeline.events import ExchangeRecorded
from pipeline.log.broker import Broker
from tests.rollout_gateway.conftest import StartGateway
from tests.rollout_gateway.frameworks import AGENTS, cli, client_environment, node
from tests.rollout_gateway.thinker import Delegator, Thinker
from trainer.sequences import build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4


def ai_sdk(major: int) -> list[str]:
    return [str(node()), str(AGENTS / "node" / "ai_sdk_steps.mjs"), str(major)]


CLAUDE = ("claude", "@anthropic-ai/claude-code-*/claude")
PROGRAMS: dict[str, Callable[[], Sequence[str]]] = {
    "Claude Code": lambda: cli(*CLAUDE),
    "Codex CLI": lambda: cli("codex", "@openai/codex/bin/codex.js"),
    "AI SDK 5": lambda: ai_sdk(5),
    "AI SDK 6": lambda: ai_sdk(6),
}


async def run(start: StartGateway, program: Sequence[str], folder: Path, model: Thinker) -> dict[str, Any]:
    """Run a program that names no run, and return what it printed."""
    await model.start()
    try:
        gateway = await anyio.to_thread.run_sync(lambda: start(urls=(model.url,), **{"detection.enabled": True}))
        env = client_environment({"base_url": f"{gateway.url}/v1", "api_key": "none"})
        env["AGENT_FOLDER"] = str(folder)
        done = await anyio.to_thread.run_sync(
            lambda: subprocess.run(program, capture_output=True, text=True, timeout=300, env=env)
        )
    finally:
        await model.stop()
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return said


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_session_is_found_whole_and_the_tool_steps_of_a_turn_are_one_training_sequence(
    start_gateway_alone: StartGateway, broker: Broker, name: str, tmp_path: Path
) -> None:
    """The template shows no thoughts before the last message of the user, so a new turn is a new sequence."""
    said = await run(start_gateway_alone, PROGRAMS[name](), tmp_path, Thinker(STEPS))
    assert said["cells"] == ["a1", "b2"] * STEPS
    assert said["text"].count("Done.") == 2
    events = [r.event for r in await broker.read(ExchangeRecorded)]
    (trajectory,) = {event.trajectory for event in events}
    searches = name == "Claude Code"  # it has the model find the tool first
    thoughts = [bytes(s.ids.astype("uint8")).count(b"<think>") for s in build(trajectory, events)]
    assert thoughts == [searches + STEPS + 1, STEPS + 1]
    assert len(events) == sum(thoughts)


async def test_claude_codes_agents_and_its_compacted_session_are_one_run(
    start_gateway_alone: StartGateway, broker: Broker, tmp_path: Path
) -> None:
    turns = ("Delegate: mend the parser of the nightly build.", "/compact", "Thank you, and go on.")
    await run(start_gateway_alone, cli(*CLAUDE, *turns), tmp_path, Delegator())
    recorded = [r.event for r in await broker.read(ExchangeRecorded)]
    assert len(recorded) == 2 + 2 * 2 + 1 + 1  # its own, two of each agent, the summary, and what came after
    assert len({event.trajectory for event in recorded}) == 1
