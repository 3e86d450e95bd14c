"""The LangGraph example: calendars, rewards, its tokenizer, and the graph with a scripted model."""

from __future__ import annotations

import json
import random

import httpx
import pytest

from examples.common import tiny
from examples.langgraph_team.calendars import COST, ROUNDS, TIMES, WRONG, Scenario, find_time, scenario
from examples.langgraph_team.make_model import REPLIES, proposals, taught_run, words
from journeywork import Trajectory

TASK = Scenario(ann=("Mon-am", "Tue-pm"), ben=("Tue-pm", "Wed-am"))


def test_every_scenario_has_a_common_time_and_held_out_ones_are_the_same_for_every_run() -> None:
    for number in range(200):
        task = scenario("train", number)
        assert set(task.ann) & set(task.ben)
        assert len(set(task.ann)) == len(set(task.ben)) == 3
    assert scenario("val", 3, seed=1) == scenario("val", 3, seed=2)
    assert scenario("train", 3, seed=1) != scenario("train", 3, seed=2)


def test_rewards() -> None:
    assert TASK.reward("Tue-pm", 1) == 1
    assert TASK.reward("Tue-pm", 3) == pytest.approx(1 - 2 * COST)
    assert TASK.reward("Mon-am", 1) == TASK.reward("Wed-am", 2) == TASK.reward("any time", 1) == WRONG
    assert TASK.reward("", ROUNDS) == 0


def test_a_time_is_found_in_a_sentence() -> None:
    assert find_time("How about Tue-pm, or else Mon-am?") == "Tue-pm"
    assert find_time(" whenever ") == "whenever"


def test_a_reply_is_one_token_and_the_teacher_plays_both_roles() -> None:
    tokenizer = tiny.make_tokenizer(words())
    assert all(len(tokenizer(reply).input_ids) == 1 for reply in REPLIES)
    calls = taught_run(scenario("train", 0), random.Random(0))
    lengths = set()
    for chat, (shares,) in calls:
        assert sum(shares) == pytest.approx(1)
        assert shares[REPLIES.index(chat[-1]["content"])] > 0
        lengths.add(len(tokenizer.apply_chat_template(chat, return_dict=False)))
    assert max(lengths) <= 22  # each word and each entry of a calendar is one token
    assert sum(proposals(TASK)) == pytest.approx(1)


class Gateway:
    """Answers the proposer with one time after the other, and the checker truly."""

    def __init__(self, times: list[str]) -> None:
        self.times, self.seen = iter(times), list[str]()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/t/x/v1/chat/completions"
        assert request.headers["authorization"] == "Bearer k"
        text = json.loads(request.content)["messages"][-1]["content"]
        self.seen.append(text.split("\n")[0])
        first, _, value = self.seen[-1].partition(": ")
        reply = next(self.times) if first == "Refused" else "yes" if value in TASK.ben else "no"
        choice = {"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
        return httpx.Response(
            200,
            json={"id": "c", "object": "chat.completion", "created": 0, "model": "m@1", "choices": [choice]},
        )


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("times", "reward", "seen"),
    [
        (["Tue-pm"], 1.0, ["Refused: none", "Proposed: Tue-pm"]),
        (
            ["Mon-am", "Wed-am"],
            WRONG,
            ["Refused: none", "Proposed: Mon-am", "Refused: Mon-am", "Proposed: Wed-am"],
        ),
        (["Mon-am", "Mon-am", "Thu-pm"], 0.0, None),
    ],
)
async def test_the_two_talk_until_they_agree_or_give_up(
    monkeypatch: pytest.MonkeyPatch, times: list[str], reward: float, seen: list[str] | None
) -> None:
    reason = "the extra `langgraph` is not installed"
    pytest.importorskip("langgraph", reason=reason)
    pytest.importorskip("langchain_openai", reason=reason)
    from examples.langgraph_team import train

    gateway = Gateway(times)
    run = Trajectory("x", train.MODEL, "g", "http://gateway/t/x/v1", "k")
    async with httpx.AsyncClient(transport=httpx.MockTransport(gateway)) as http:
        monkeypatch.setattr(train, "HTTP", http)
        assert await train.meet(run, TASK) == pytest.approx(reward)
    assert run.metrics == {"agreed": float(reward != 0), "proposals": len(times)}
    assert seen is None or gateway.seen == seen


def test_the_calendar_is_shown_a_time_a_line() -> None:
    (_, _), (_, text) = TASK.for_proposer(["Mon-pm"])
    first, *lines = text.split("\n")
    assert first == "Refused: Mon-pm"
    assert [line.partition(": ")[0] for line in lines] == list(TIMES)
    assert {line for line in lines if line.endswith("free")} == {"Mon-am: free", "Tue-pm: free"}
