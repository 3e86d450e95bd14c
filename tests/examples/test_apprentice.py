"""The example's master: a provider in a process of its own, with a key and a bill."""

from __future__ import annotations

import os
from statistics import fmean
from typing import Any

import openai
import pytest

from examples.apprentice import demo, master
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
