"""The view `shadows` and its page: both answers of a call, what compared them, and how sure the apprentice was."""

from contextlib import closing
from pathlib import Path

from pipeline.config import Config, ModelConfig
from pipeline.events import Event
from store.showing.pages.history import History
from store.showing.pages.shadows import shadows
from tests.store.kit import compared, exchange, fill, opened, shadow
from tests.store.reading.test_sql import rows


def history() -> list[Event]:
    outside = {"policy_version": "outside:master", "cost_usd": 0.5, "at": 4_000_000}
    return [
        opened("r", model="master", task="win"),
        *(exchange("r", seq, -1, **outside) for seq in range(4)),
        shadow("r", 0, same=True, at=2_000_000),
        *(shadow("r", call) for call in (1, 2, 3)),
        compared("r", 1, 0.5, 0.5),
        compared("r", 2, 0.75, 0.25),
    ]


def test_shadow_calls_stand_beside_the_calls_that_they_shadow(tmp_path: Path) -> None:
    fill(tmp_path, *history())
    found = rows(tmp_path, "SELECT seq, task, same, apprentice_score, as_good FROM shadows ORDER BY seq")
    assert found == [
        (0, "win", True, None, True),
        (1, "win", False, 0.5, True),
        (2, "win", False, 0.25, False),
        (3, "win", False, None, False),
    ]
    (of_first,) = rows(
        tmp_path,
        """SELECT outside, policy_version, mean_logprob, least_logprob, cost_usd, latency_s, outside_latency_s,
             outside_response ->> '$.choices[0].message.content', response ->> '$.choices[0].message.content'
           FROM shadows WHERE seq = 0""",
    )
    assert of_first == ("master", "m@1", -0.375, -0.5, 0.5, 1.0, 3.0, "x", "y")


def test_page_has_agreement_by_task_and_where_the_apprentice_was_worse(tmp_path: Path) -> None:
    fill(tmp_path, *history())
    with closing(History(Config(run_dir=str(tmp_path), project="p", models=(ModelConfig(name="m"),)))) as shown:
        page = shadows(shown, {})
    (row,) = page["agreement"]
    assert (row["task"], row["policy_version"], row["calls"], row["same"], row["mean"]) == ("win", "m@1", 4, 0.25, 0.5)
    assert {worse["seq"] for worse in page["rows"]} == {2, 3}
    assert {tuple(answer["content"] for answer in worse["answers"]) for worse in page["rows"]} == {("x", "y")}
