"""RULER, scenarios of tools, and agents of LangGraph."""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

from .kit import TOOL, Served, art, part, said, served, user

__all__ = ["served"]  # a fixture


def judge(marks: Sequence[str], worth: Callable[[int], float] = lambda n: n / 10) -> Callable[[Any], str]:
    """A judge that scores the attempt with the n-th mark in its text. ART's prompt numbers the attempts; ours shows
    them in another order in each call, under ids drawn for it, and names the key of the scores."""

    def reply(request: dict[str, Any]) -> str:
        prompt = request["messages"][-1]["content"]
        shown = re.findall(r"BEGIN [0-9a-f]{16} trajectory (\w+) =+\n(.*?)\n=+ END", prompt, re.S)
        key = "id" if shown else "trajectory_id"
        names = [next((i for i, text in shown if mark in text), str(n)) for n, mark in enumerate(marks, 1)]
        drawn = re.search(r'"(score_\w+)"', request["messages"][0]["content"])
        score = drawn[1] if drawn and shown else "score"
        said = [{key: name, "explanation": f"why {n}", score: worth(n)} for n, name in enumerate(names, 1)]
        return json.dumps({"scores": said})

    return reply


def marks(count: int) -> list[str]:
    return [f"reply number {n}" for n in range(1, count + 1)]


def answers(count: int) -> Any:
    shared = [{"role": "system", "content": "the one goal"}, user("go")]
    return art.TrajectoryGroup(
        [
            art.Trajectory(messages_and_choices=[*shared, said(f"reply number {n}")], reward=n, metrics={"w": 1})
            for n in range(1, count + 1)
        ]
    )


def score(group: Any, served: Served, **options: Any) -> Any:
    params = {"api_base": served.url, "api_key": "k"}
    run = part("rewards").ruler_score_group(group, "openai/judge", extra_litellm_params=params, **options)
    return asyncio.run(run)


def test_ruler_scores_a_group(served: Served) -> None:
    served.says(judge(marks(3)))
    group = answers(3)
    judged = score(group, served)
    assert judged is not group
    assert [t.reward for t in judged] == [0.1, 0.2, 0.3]
    assert [t.metrics["independent_reward"] for t in judged] == [1, 2, 3]
    assert [t.metrics["ruler_score"] for t in judged] == [0.1, 0.2, 0.3]
    assert [t.metrics["w"] for t in judged] == [1, 1, 1]
    assert [t.logs[-1] for t in judged] == [f"RULER explanation: why {n}" for n in (1, 2, 3)]
    assert [t.reward for t in group] == [1, 2, 3]


def test_ruler_shows_what_is_common_once(served: Served) -> None:
    served.says(judge(marks(4)))
    score(answers(4), served, rubric="- my own rubric 4")
    _, body = served.requests[0]
    text = json.dumps(body["messages"])
    assert (text.count("the one goal"), text.count("my own rubric 4")) == (1, 1)
    assert all(text.count(f"reply number {n}") == 1 for n in range(1, 5))
    assert body["model"] == "judge"
    assert body["response_format"]["type"] == "json_schema"


@pytest.mark.parametrize("reply", [judge(marks(1))({"messages": [{"content": ""}]}), "no JSON at all"])
def test_a_judge_that_does_not_answer_the_question(served: Served, reply: str) -> None:
    served.says(lambda _: reply)
    with pytest.raises(ValueError, match=r"."):
        score(answers(5 + len(reply)), served)
    assert score(answers(6 + len(reply)), served, swallow_exceptions=True) is None


def test_ruler_takes_no_additional_histories(served: Served) -> None:
    group = answers(2)
    group.trajectories[0].additional_histories = [part("trajectories").History(messages_and_choices=[])]
    with pytest.raises(ValueError, match=r"(?i)histories"):
        score(group, served)


def test_ruler_scores_lists_of_messages(served: Served) -> None:
    served.says(judge(["one way", "another way"]))
    run = part("rewards").ruler(
        [[user("one way")], [user("another way")]],
        "openai/judge",
        extra_litellm_params={"api_base": served.url, "api_key": "k"},
        tools=[TOOL],
    )
    made = asyncio.run(run)
    assert [(s.trajectory_id, s.explanation, s.score) for s in made] == [("1", "why 1", 0.1), ("2", "why 2", 0.2)]
    assert "find" in json.dumps(served.requests[0][1]["messages"])


def test_ruler_of_nothing() -> None:
    assert asyncio.run(part("rewards").ruler([], "openai/judge")) == []
    assert len(asyncio.run(part("rewards").ruler_score_group(art.TrajectoryGroup([]), "openai/judge"))) == 0


def test_tools_and_resources_of_a_server() -> None:
    mcp = part("mcp")
    fields = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    tool = mcp.MCPTool.from_dict(fields)
    assert (tool, tool.to_dict()) == (mcp.MCPTool(**fields), fields)
    assert tool.to_tool_schema() == {"type": "function", "function": fields}
    assert mcp.MCPTool.from_dict({"name": "f"}).description == ""
    made = mcp.MCPResource.from_dict({"uri": "u", "name": "n", "mimeType": "text/plain"})
    assert (made.uri, made.name, made.description, made.mime_type) == ("u", "n", "", "text/plain")


def generated(served: Served, tools: Any = ({"name": "find", "description": "finds"},), **options: Any) -> Any:
    options = {"generator_model": "gen", "generator_api_key": "key", "generator_base_url": served.url} | options
    return asyncio.run(part("mcp").generate_scenarios(list(tools), num_scenarios=3, **options))


def test_scenarios_are_generated_of_tools(served: Served) -> None:
    made = {"scenarios": [{"task": f"task {n}", "difficulty": 1 + n % 5} for n in range(3)]}
    served.says(lambda _: json.dumps(made))
    stock = {"uri": "file://inventory", "name": "inventory", "description": "stock"}
    collection = generated(served, resources=[stock], custom_instructions="mention ships", show_preview=True)
    assert [s.task for s in collection.scenarios] == ["task 0", "task 1", "task 2"]
    assert sorted(s.task for s in collection.shuffle()) == ["task 0", "task 1", "task 2"]
    headers, body = served.requests[0]
    assert (headers["authorization"], body["model"]) == ("Bearer key", "gen")
    text = json.dumps(body["messages"])
    assert all(word in text for word in ("find", "inventory", "mention ships"))


def test_what_is_lacking_for_scenarios_is_an_error(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="resource"):
        generated(served, tools=())
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ValueError, match="OPENROUTER_API_KEY"):
        generated(served, generator_api_key=None)


@pytest.mark.filterwarnings("ignore:create_react_agent")
def test_the_chat_model_of_a_wrapped_rollout(served: Served) -> None:
    pytest.importorskip("langchain_openai")
    prebuilt = pytest.importorskip("langgraph.prebuilt")
    langgraph = part("langgraph")
    model = art.Model(
        name="gpt", project="p", inference_api_key="k", inference_base_url=served.url, inference_model_name="gpt"
    )

    async def rollout(_: Any, text: str) -> Any:
        chat = langgraph.init_chat_model(model.get_inference_name(), temperature=1.0)
        agent = prebuilt.create_react_agent(chat, [])
        await agent.ainvoke({"messages": [("user", text)]}, config={"configurable": {"thread_id": "t"}})
        if hasattr(chat, "root_async_client"):
            await chat.root_async_client.close()  # LangChain leaves it open
        return art.Trajectory(reward=0.5, metadata={"a": 1})

    made = asyncio.run(langgraph.wrap_rollout(model, rollout)(model, "hello"))
    assert (made.reward, made.metadata) == (0.5, {"a": 1})
    assert [(m["role"], m["content"]) for m in made.messages()] == [("user", "hello"), ("assistant", "after 1")]
    assert isinstance(made.messages_and_choices[1], Choice)
