"""What people look for: runs by text, reward, day and user, groups by their task, and runs that wait for feedback."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from pipeline.config import Config, FeedbackConfig, save
from pipeline.running.installations import SETTINGS
from store.showing.pages import chat
from tests.store.kit import completed, discarded, exchange, fill, opened, scored
from tests.store.showing.dashboard.conftest import Open, client_of

DAY_US = 86_400 * 10**6


def run_of(name: str, reply: str = "x", **more: Any) -> list[Any]:
    """A run of a group of its own, with one call."""
    group, at = f"g-{name}", more.pop("day", 20_000) * DAY_US
    opening = opened(name, group=group, at=at, metadata=msgspec.json.encode({"subject": f"user-{name}"}))
    response = msgspec.json.encode({"choices": [{"message": {"role": "assistant", "content": reply}}]})
    return [opening, exchange(name, group=group, response=response), completed(name, group=group, **more)]


@pytest.fixture
def filtered(tmp_path: Path) -> Any:
    folder = tmp_path / "runs" / "here"
    folder.mkdir(parents=True)
    fill(
        folder,
        *run_of("low", 'He said "Grüße"', reward=0.25, day=20_001),
        *run_of("high", reward=0.75),
        *run_of("judged"),
        scored("g-judged", {"judged": 0.5}),
        *run_of("dropped"),
        discarded("g-dropped", "unscored", "dropped"),
        *run_of("fresh"),
        *run_of("old", at=1_000_000),
    )
    save(Config(project="p", run_dir=str(folder), feedback=FeedbackConfig(wait_s=3600)), folder / SETTINGS)
    with client_of(folder) as client:
        yield client


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({"text": 'SAID "GRÜßE'}, {"low"}),
        ({"text": "high"}, {"high"}),
        ({"text": "%"}, set()),
        ({"least": "0.5"}, {"high", "judged"}),
        ({"least": "0.1", "most": "0.5"}, {"low", "judged"}),
        ({"since": "2024-10-05"}, {"low"}),
        ({"since": "2024-W40-6"}, {"low"}),
        ({"least": "１"}, set()),
        ({"until": "2024-10-04"}, {"high", "judged", "dropped", "fresh", "old"}),
        ({"user": "user-low"}, {"low"}),
        ({"user": "user"}, set()),
        ({"outcome": "waits"}, {"fresh", "old"}),
        ({"outcome": "scored"}, {"low", "high", "judged", "dropped"}),
    ],
)
def test_runs_are_found_by_text_reward_day_user_and_state(
    filtered: TestClient, query: dict[str, str], names: set[str]
) -> None:
    rows = filtered.get("/trajectories.json", params=query).json()["rows"]
    assert {row["trajectory"] for row in rows} == names
    assert filtered.get("/trajectories", params=query).status_code == 200


def test_a_run_waits_until_its_group_is_decided(filtered: TestClient) -> None:
    rows = {row["trajectory"]: row for row in filtered.get("/trajectories.json?sort=-reward").json()["rows"]}
    assert {name for name, row in rows.items() if row["outcome"] == "waits"} == {"fresh", "old"}
    assert {name for name, row in rows.items() if row["outcome"] == "scored"} == {"low", "high", "judged", "dropped"}
    assert rows["judged"]["reward"] == 0.5  # the reward for training
    until = datetime.fromisoformat(rows["fresh"]["waits_until"]).replace(tzinfo=UTC)
    assert 0 < (until - datetime.now(UTC)).total_seconds() <= 3600
    assert rows["old"]["waits_until"] is None
    assert "It waits for feedback until" in filtered.get("/group/g-fresh").text
    assert "waits for feedback until" in filtered.get("/trajectory/fresh").text
    assert "Not scored yet." in filtered.get("/group/g-old").text


def test_a_group_is_called_by_its_task_else_by_its_first_message(open_dashboard: Open, run_dir: Path) -> None:
    told = scored("g-told", {"told": 0.5}, task="Move it.")
    fill(run_dir, *run_of("bare"), scored("g-bare", {"bare": 0.5}), *run_of("told", task="Move it."), told)
    client = open_dashboard()
    tasks = {row["group_id"]: row["task"] for row in client.get("/groups.json").json()["rows"]}
    assert tasks == {"g0": "win", "g9": "", "g-bare": "go 0", "g-told": "Move it."}
    assert "<h1>go 0</h1>" in client.get("/group/g-bare").text
    texts_of = [client.get(f"/{page}").text for page in ("group/g-told", "trajectory/told")]
    assert ["Move it." in text and "Move it.." not in text for text in texts_of] == [True, True]
    assert "<h1>win</h1>" in client.get("/group/g0").text
    assert "<h1>Group g9</h1>" in client.get("/group/g9").text


def test_reasoning_and_refusals_are_shown_as_text(open_dashboard: Open, run_dir: Path) -> None:
    said = {"role": "assistant", "content": None, "reasoning_content": "<i>think</i>", "refusal": "<b>no</b>"}
    request = msgspec.json.encode({"messages": [{"role": "user", "content": "go"}, said]})
    response = msgspec.json.encode({"choices": [{"message": {**said, "reasoning": "again"}}]})
    (begun, _, done) = run_of("thinks")
    fill(run_dir, begun, exchange("thinks", group="g-thinks", request=request, response=response), done)
    client = open_dashboard()
    for page in ("trajectory/thinks", "group/g-thinks"):
        text = client.get(f"/{page}").text
        assert "&lt;i&gt;think&lt;/i&gt;" in text, page
        assert "&lt;b&gt;no&lt;/b&gt;" in text, page
        assert "again" in text, page


@pytest.mark.parametrize(("reasoning", "same"), [("", True), ("sampled", True), ("another", False)])
def test_a_reply_that_is_sent_again_is_known_with_and_without_its_reasoning(reasoning: str, same: bool) -> None:
    reply = chat.shown_message({"role": "assistant", "content": "x", "reasoning": "sampled"})
    sent = chat.shown_message({"role": "assistant", "content": "x", "reasoning_content": reasoning})
    assert chat.is_same_reply(sent, reply) == same
