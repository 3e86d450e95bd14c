"""The example's master: a provider in a process of its own, with a key and a bill."""

import os
from statistics import fmean
from typing import Any

import openai
import pytest

from examples.apprentice import demo, master, prompts, takeover
from examples.inbox.messages import message, right_fields


def test_master_is_right_in_95_percent_and_wrong_about_the_team_only() -> None:
    fields = [right_fields(m, master.answer(m.text)) for m in (message("train", number, 3) for number in range(2000))]
    assert abs(fmean(f["solved"] for f in fields) - 0.95) < 0.015
    assert all(f["urgency"] == f["order"] == 1 for f in fields)


def test_master_answers_openais_client_and_no_other_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(demo.KEY_ENV, "")
    said = next(m for m in (message("held_out", number) for number in range(9)) if master.answer(m.text) == m.right)
    ask: dict[str, Any] = {"model": "scripted-1", "messages": said.prompt}
    with demo.master() as table:
        with openai.OpenAI(base_url=table["url"], api_key=os.environ[demo.KEY_ENV]) as client:
            reply = client.chat.completions.create(**ask)
        assert reply.choices[0].message.content == said.right
        assert reply.usage is not None
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens > 0
        with (
            openai.OpenAI(base_url=table["url"], api_key="other", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="wrong key"),
        ):
            client.chat.completions.create(**ask)


def test_share_and_money_are_drawn_over_time() -> None:
    over_time = [{"s": 1.0, "share": 0.0, "usd_per_task": 2e-4}, {"s": 11.0, "share": 0.9, "usd_per_task": 0.0}]
    assert takeover.draw(over_time).startswith("<?xml")
    assert "cents for a task" in takeover.draw(over_time)


def test_stand_in_writes_prompts_with_right_answers_to_what_was_shown() -> None:
    shown = prompts.TASKS[:2]
    asked = f"I gave:\n```\nsort\n```\nThe inputs:\n{shown[0].text} {shown[1].text}\nAnswer within ``` blocks."
    first = prompts.better_prompt(asked)
    assert all(f"Message: {said.text}\nAnswer: {said.right}" in first for said in shown)
    inner = first.removeprefix("```\n").removesuffix("\n```")
    further = prompts.better_prompt(f"```\n{inner}\n```\n{prompts.TASKS[2].text}")
    assert further.count("Message: ") == 3
    with pytest.raises(ValueError, match="no request"):
        prompts.better_prompt("hello")


def test_prompts_are_tried_on_messages_that_no_version_saw() -> None:
    used = {message("train", number).text for number in range(takeover.FROM, takeover.FROM + takeover.AT_MOST)}
    assert not used & {said.text for said in prompts.TASKS}
