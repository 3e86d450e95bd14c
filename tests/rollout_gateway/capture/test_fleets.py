"""Agents that name no run and change their history: what Claude Code, Codex, LangGraph and the Agents SDK send when
they compact, hand over and start agents of their own. Real HTTP and a gateway's process; the inference server is
scripted."""

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

import anyio.to_thread
import httpx
import msgspec
import pytest

from pipeline.config import NatsConfig
from pipeline.events import ExchangeRecorded, TrajectoryCompleted, TrajectoryOpened
from pipeline.log.broker import Broker
from tests.kits.waiting import until
from tests.rollout_gateway.conftest import GatewayProcess, StartGateway
from tests.rollout_gateway.fake_vllm import FakeVllm

IDLE_S, NO_TIME_S = 600.0, 0.1
"""The time of silence while agents call, and after their last call."""
Message = dict[str, Any]
SUMMARY = "Write a summary of the work so far."


def text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content or ())


def calls(name: str, **arguments: Any) -> Message:
    function = {"name": name, "arguments": msgspec.json.encode(arguments).decode()}
    call = {"id": f"call-{uuid.uuid4().hex}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def says(content: str) -> Message:
    return {"role": "assistant", "content": content}


class Model(FakeVllm):
    """Answers what was said last. `sampled`: something that no other answer has."""

    sampled: Callable[[], str] = staticmethod(lambda: uuid.uuid4().hex)
    malformed = False

    async def _answer(self, path: str, body: Any) -> tuple[int, Any]:
        status, answer = await super()._answer(path, body)
        if path == "/v1/chat/completions" and status == 200:
            answer["id"] = f"chatcmpl-{uuid.uuid4().hex}"
            answer["choices"][0]["message"] = self.reply(text(body["messages"][-1].get("content")))
            answer["usage"] = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
        return status, answer

    def reply(self, asked: str) -> Message:
        if "Search" in asked:
            return calls("search", query=asked)
        if "Delegate" in asked:
            return calls("Task", prompt=f"Look for the cause of the failure {self.sampled()} and report what you find.")
        if SUMMARY in asked:
            return says(
                f"<analysis>\nThe user asked for a mended parser, and {self.sampled()} came first.\n</analysis>\n"
                f"<summary>\nThe parser was mended in three of the four places, see {self.sampled()}.\n</summary>"
            )
        if "Look" in asked or "read" in asked:
            reply = calls("Read", path=f"/src/{self.sampled()}.py")
            if self.malformed:
                reply["tool_calls"][0]["function"]["arguments"] = '{"path": /src'
            return reply
        return says(f"It is done now, and this is what came of all of it: {self.sampled()}.")


class Agent:
    """A client of the gateway, as a program speaks to it."""

    def __init__(self, url: str, key: str = "none") -> None:
        self.url, self.key = url, key

    async def post(self, path: str, **body: Any) -> Any:
        async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {self.key}"}) as client:
            reply = await client.post(f"{self.url}{path}", json={"model": "tictactoe", **body})
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def chat(self, system: str, messages: list[Message], tools: tuple[str, ...] = ()) -> Message:
        """Add the answer to `messages`."""
        named = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in tools]
        asked: dict[str, Any] = {"messages": [{"role": "system", "content": system}, *messages]}
        answer = await self.post("/v1/chat/completions", **asked, **({"tools": named} if tools else {}))
        messages.append(answer["choices"][0]["message"])
        return messages[-1]

    async def claude(self, system: str, messages: list[Message], tools: tuple[str, ...]) -> list[Message]:
        named = [{"name": name, "input_schema": {"type": "object"}} for name in tools]
        blocks = [{"type": "text", "text": system}]
        asked = {"system": blocks, "messages": messages, "tools": named, "max_tokens": 1000}
        answer = await self.post("/v1/messages", **asked)
        messages.append({"role": "assistant", "content": answer["content"]})
        return list(answer["content"])

    async def respond(self, items: list[Message]) -> None:
        tools = [{"type": "function", "name": "read", "parameters": {}}]
        answer = await self.post("/v1/responses", instructions="You are Codex.", input=items, tools=tools, store=False)
        items += answer["output"]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def claude_result(block: Message, result: str) -> Message:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block["id"], "content": result}]}


@asynccontextmanager
async def front(start: StartGateway, model: FakeVllm, **settings: Any) -> AsyncIterator[GatewayProcess]:
    await model.start()
    try:
        options = {"detection.enabled": True, "detection.idle_s": IDLE_S, **settings}
        yield await anyio.to_thread.run_sync(lambda: start(urls=(model.url,), **options))
    finally:
        await model.stop()


async def completed(gateway: GatewayProcess) -> list[TrajectoryCompleted]:
    """Start the gateway again with a short time of silence, and wait until it has completed every run that was opened.
    Return the completions, the longest run first."""
    # A run whose gateway is killed between its answer and the word that it waits is restored, and waits longer.
    times = {"detection.idle_s": NO_TIME_S, "replicas.timeout_s": 10.0}
    await anyio.to_thread.run_sync(lambda: gateway.restart(**times))
    async with Broker.connect(gateway.config.nats) as broker:

        async def all_completed() -> list[Any]:
            done = await broker.read(TrajectoryCompleted)
            return done if len(done) == len(await broker.read(TrajectoryOpened)) else []

        runs = sorted((r.event for r in await until(all_completed)), key=lambda e: -e.exchanges)
        assert sum(e.exchanges for e in runs) == len(await broker.read(ExchangeRecorded))
        return runs


def wholes(runs: list[TrajectoryCompleted]) -> set[str]:
    """Groups of the runs that are no parts."""
    return {run.group for run in runs if not run.group.startswith("i-part-")}


MAIN, SUB = ("Read", "Task"), ("Read",)


REMINDER = {
    "type": "text",
    "text": "<system-reminder>\nEnd commit messages with the usual lines, all of them.\n</system-reminder>",
}


async def claude_code(agent: Agent, compacts: Literal["", "all", "but the end"]) -> None:
    """Two agents by its tool Task at once, then `/compact`, which has a system prompt of its own and no tools. Versions
    from 2.1.3 leave the end of the conversation out of the summary and keep it, and remind agents, too."""
    system, messages = "You are Claude Code.", [user("Delegate: mend the parser.")]
    (task,) = await agent.claude(system, messages, MAIN)
    reports = []

    async def subagent() -> None:
        reminders = [REMINDER] if compacts == "but the end" else []
        said = [{"role": "user", "content": [*reminders, {"type": "text", "text": task["input"]["prompt"]}]}]
        (read,) = await agent.claude("You are an agent for Claude Code.", said, SUB)
        said.append(claude_result(read, "def parse(): ..."))
        reports.append((await agent.claude("You are an agent for Claude Code.", said, SUB))[0]["text"])

    async with anyio.create_task_group() as tg:
        for _ in range(2):
            tg.start_soon(subagent)
    messages.append(claude_result(task, reports[0]))
    await agent.claude(system, messages, MAIN)
    if compacts:
        end = [messages.pop()] if compacts == "but the end" else []
        messages.append(user(SUMMARY))
        (summary,) = await agent.claude("You summarize conversations.", messages, ())
        kept = summary["text"].partition("<summary>")[2].removesuffix("</summary>").strip()
        messages[:] = [user(f"This session continues an earlier one.\n\nSummary:\n{kept}"), *end, user("Go on.")]
        await agent.claude(system, messages, MAIN)
    messages.append(user("Thank you."))
    await agent.claude(system, messages, MAIN)


async def codex(agent: Agent) -> None:
    """After a compaction come the earlier messages of the user and the summary, as one more of them."""
    asked = [user("<environment_context>/repo</environment_context>"), user("Please read the parser.")]
    items = list(asked)
    await agent.respond(items)
    items.append({"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "def f(): ..."})
    await agent.respond(items)
    items.append(user(SUMMARY))
    await agent.respond(items)
    summary = items[-1]["content"][0]["text"]
    items = [*asked, user(f"Another model began to solve this problem. Its summary:\n{summary}")]
    await agent.respond(items)


async def trims(agent: Agent) -> None:
    """LangGraph's `trim_messages` keeps the system prompt and the end."""
    said = [user("What came of it?")]
    for turn in range(4):
        await agent.chat("Answer.", said)
        said = [*said, user(f"And of number {turn}?")][-3:]


async def hands_over(agent: Agent) -> None:
    """The Agents SDK hands the whole history to an agent with another prompt and other tools."""
    said = [user("Please read the bill.")]
    (call,) = (await agent.chat("You sort requests.", said, ("to_billing",)))["tool_calls"]
    said.append({"role": "tool", "tool_call_id": call["id"], "content": '{"assistant": "billing"}'})
    await agent.chat("You know about bills.", said, ("refund",))


CLAUDE_CODES = [partial(claude_code, compacts=compacts) for compacts in ("", "all", "but the end")]


@pytest.mark.parametrize(
    ("agents", "calls", "tasks"),
    [
        (CLAUDE_CODES * 2, [9, 9, 9, 9, 7, 7], 1),
        ([codex] * 3, [4, 4, 4], 1),
        ([trims, hands_over] * 3, [4, 4, 4, 2, 2, 2], 2),
    ],
    ids=["Claude Code", "Codex", "LangGraph and the Agents SDK"],
)
async def test_agents_that_change_their_histories_go_on_in_the_same_run(
    start_gateway_alone: StartGateway, agents: list[Any], calls: list[int], tasks: int
) -> None:
    async with front(start_gateway_alone, Model()) as gateway, anyio.create_task_group() as tg:
        for agent in agents:
            tg.start_soon(agent, Agent(gateway.url))
    runs = await completed(gateway)
    assert [run.exchanges for run in runs] == calls
    assert len(wholes(runs)) == tasks
    assert {run.outcome for run in runs} == {"scored"}


async def test_what_may_belong_to_several_runs_is_a_part_and_so_are_they(start_gateway_alone: StartGateway) -> None:
    """Runs of two tasks come to the same summary. The rest of one is nobody's, and none of the three is compared with
    runs that are whole."""
    model = Model()
    model.sampled = lambda: "the-same"
    async with front(start_gateway_alone, model) as gateway:
        agent = Agent(gateway.url)
        for task in ("Mend the parser.", "Mend the lexer."):
            said = [user(task)]
            await agent.chat("Answer.", said)
            said.append(user(SUMMARY))
            await agent.chat("Answer.", said)
            await agent.chat("Answer.", [user(task)])  # and one that is whole
        await agent.chat("Answer.", [user(f"The work so far:\n{said[-1]['content']}"), user("Go on.")])
    runs = await completed(gateway)
    assert [(run.exchanges, run.outcome) for run in runs[:2]] == [(2, "masked")] * 2
    assert [(run.exchanges, run.outcome) for run in runs[2:]] == [(1, "scored")] * 3
    part, *scored = sorted(run.group for run in runs[2:])[::-1]
    assert part.startswith("i-part-")
    assert set(scored) == wholes(runs) == {run.group for run in runs[:2]}


async def test_a_run_that_went_on_too_late_is_a_part(start_gateway_alone: StartGateway) -> None:
    """Its beginning was completed as a run; the rest of it is not compared with others of the same task."""
    async with front(start_gateway_alone, Model()) as gateway:
        agent, said = Agent(gateway.url), [user("Mend the parser.")]
        await agent.chat("Answer.", said)
        (before,) = await completed(gateway)
        said.append(user("And now?"))
        await agent.chat("Answer.", said)
        await agent.chat("Answer.", [user("Mend the parser.")])
        runs = await completed(gateway)
    assert sorted(run.group.startswith("i-part-") for run in runs) == [False, False, True]
    assert wholes(runs) == {before.group}


async def test_calls_of_another_program_are_not_compared_with_runs_of_the_same_prompt(
    start_gateway_alone: StartGateway,
) -> None:
    """Claude Code has a title made of the user's first message."""
    async with front(start_gateway_alone, Model()) as gateway:
        agent, asked = Agent(gateway.url), "Mend the parser that fails in the nightly build, please."
        for tools in (MAIN, MAIN, ()):
            await agent.claude("You are Claude Code." if tools else "Write a title.", [user(asked)], tools)
    groups = [run.group for run in await completed(gateway)]
    assert sorted(groups.count(group) for group in groups) == [1, 2, 2]


async def test_a_compacted_run_goes_on_after_the_gateway_died(start_gateway_alone: StartGateway) -> None:
    async with front(start_gateway_alone, Model()) as gateway:
        agent, said = Agent(gateway.url), [user("Delegate: mend the parser.")]
        (task,) = (await agent.chat("Answer.", said, MAIN))["tool_calls"]

        async def die() -> None:
            gateway.kill()
            await anyio.to_thread.run_sync(gateway.start)

        await die()
        prompt = msgspec.json.decode(task["function"]["arguments"])["prompt"]
        report = await agent.chat("You are an agent.", [user(prompt)], SUB)
        await die()
        said.append({"role": "tool", "tool_call_id": task["id"], "content": str(report)})
        said.append(user(SUMMARY))
        summary = (await agent.chat("Answer.", said, MAIN))["content"]
        await die()
        await agent.chat("Answer.", [user(f"The work so far:\n{summary}")], MAIN)
    assert [run.exchanges for run in await completed(gateway)] == [4]


async def test_agents_that_say_the_same_are_never_joined(start_gateway_alone: StartGateway) -> None:
    """All get the same answers. A search repeats the question, which is the prompt of every run of its task; an answer
    repeats what the user gave; and another program quotes an answer, to grade it."""
    question = "Search for the reason why the nightly build of the parser fails."
    model = Model()
    model.sampled = lambda: "the-same"

    async def searches(agent: Agent) -> None:
        said = [user(question)]
        (call,) = (await agent.chat("Answer.", said, ("search",)))["tool_calls"]
        said.append({"role": "tool", "tool_call_id": call["id"], "content": "Nothing."})
        answer = await agent.chat("Answer.", said, ("search",))
        await agent.chat("Grade.", [user(f"Is this right?\n{answer['content']}")])

    async with front(start_gateway_alone, model) as gateway:
        for at_once in (1, 3):
            async with anyio.create_task_group() as tg:
                for _ in range(at_once):
                    tg.start_soon(searches, Agent(gateway.url))
    runs = await completed(gateway)
    assert [run.exchanges for run in runs] == [2] * 4 + [1] * 4
    assert len({run.group for run in runs[:4]}) == len({run.group for run in runs[4:]}) == 1
    assert len(wholes(runs)) == 2
    assert {run.outcome for run in runs} == {"scored"}


async def test_a_run_is_not_completed_while_an_agent_that_it_started_has_a_call(
    start_gateway_alone: StartGateway, nats_config: NatsConfig
) -> None:
    model = Model()
    # The time of silence is longer than a busy machine takes from one call to the next.
    idle = {"detection.idle_s": 8.0}
    async with front(start_gateway_alone, model, **idle) as gateway, Broker.connect(nats_config) as broker:
        agent, said = Agent(gateway.url), [user("Delegate: mend the parser.")]
        (task,) = (await agent.chat("Answer.", said, MAIN))["tool_calls"]
        await agent.chat("Answer.", [user("Another run.")])
        model.held = anyio.Event()  # type: ignore[assignment]  # it is awaited only
        async with anyio.create_task_group() as tg:
            prompt = msgspec.json.decode(task["function"]["arguments"])["prompt"]
            tg.start_soon(agent.chat, "You are an agent.", [user(prompt)], SUB)
            done = await until(partial(broker.read, TrajectoryCompleted))
            model.held.set()
        said.append({"role": "tool", "tool_call_id": task["id"], "content": "It is found."})
        await agent.chat("Answer.", said, MAIN)
    assert [r.event.exchanges for r in done] == [1]
    assert [run.exchanges for run in await completed(gateway)] == [3, 1]


@pytest.mark.parametrize("grouped", [True, False])
async def test_runs_that_begin_alike_are_a_group_unless_settings_say_otherwise(
    start_gateway_alone: StartGateway, grouped: bool
) -> None:
    outcome = "scored" if grouped else "masked"
    settings = {"detection.grouped": grouped, "detection.outcome": outcome}
    async with front(start_gateway_alone, Model(), **settings) as gateway:
        for _ in range(2):
            agent, said = Agent(gateway.url), [user("Mend the parser.")]
            await agent.chat("Answer.", said)
            await agent.chat("Answer.", [*said, user("Go on.")])
    runs = await completed(gateway)
    assert [(run.exchanges, run.outcome, run.inferred) for run in runs] == [(2, outcome, True)] * 2
    assert len({run.group_key for run in runs}) == (1 if grouped else 2)
    assert grouped or all(not run.group for run in runs)
