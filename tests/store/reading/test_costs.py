"""The view `costs`, and what else the history says of outside models."""

import contextlib
from pathlib import Path
from typing import Any

import msgspec

from pipeline.config import Config, StoreConfig
from pipeline.events import Event, ExchangeRecorded
from store.reading import sql
from store.showing.pages.history import History
from store.showing.pages.takeover import takeover_texts
from tests.store.kit import completed, exchange, fill, opened, scored, shadow
from tests.store.reading.test_sql import rows

DAY = 86_400_000_000
OUTSIDE: dict[str, Any] = {"policy_version": "outside:master", "replica": "http://x", "cost_usd": 0.25}
OUTSIDE |= dict.fromkeys(("prompt_ids", "sampled_ids", "logprobs"), b"")
OUTSIDE |= {"input_tokens": 100, "cached_tokens": 40, "output_tokens": 20}


def run(name: str, model: str, task: str, day: int, outcome: Any, reward: float | None = None) -> list[Event]:
    of: dict[str, Any] = {"model": model, "task": task}
    end = completed(name, outcome=outcome, reward=reward, at=day * DAY + 1, **of)
    return [opened(name, at=day * DAY, **of), end]


def answered(name: str, seq: int, **more: Any) -> ExchangeRecorded:
    """A call that the master answered."""
    return exchange(name, seq, -1, **{**OUTSIDE, "model": "master", **more})


def test_money_and_tokens_per_solved_run_whoever_answered(tmp_path: Path) -> None:
    unpriced = {"input_tokens": 0, "cached_tokens": 0, "output_tokens": 0, "cost_usd": None}
    fill(
        tmp_path,
        *run("a", "master", "one", 1, "scored", 1.0),
        answered("a", 0),
        answered("a", 1, choice=0),
        answered("a", 1, choice=1, **unpriced),
        *run("b", "master", "one", 1, "scored"),
        answered("b", 0),
        answered("b", 1, status="failed", **unpriced),
        *run("c", "master", "one", 1, "no_result"),
        answered("c", 0),
        *run("d", "m", "one", 2, "scored", 1.0),
        exchange("d", 0, 3),
        answered("d", 1, model="m"),
        *run("e", "m", "two", 2, "scored", 0.0),
        exchange("e", 0, 3),
        exchange("e", 0, 3, copied_from="x/0", choice=1),
        scored("g", {"b": 0.0}),
    )
    found = rows(
        tmp_path,
        """SELECT model, version, task, day::VARCHAR, outcome, runs, solved, calls, input_tokens, cached_tokens,
             output_tokens, cost_usd, unpriced, usd_per_solved, tokens_per_solved FROM costs ORDER BY ALL""",
    )
    assert found == [
        ("m", "m@3", "one", "1970-01-03", "scored", 1, 1, 1, 3, 0, 2, 0.0, 0, 0.0, 5.0),
        ("m", "m@3", "two", "1970-01-03", "scored", 1, 0, 1, 3, 0, 2, 0.0, 0, None, None),
        ("m", "outside:master", "one", "1970-01-03", "scored", 1, 1, 1, 100, 40, 20, 0.25, 0, 0.25, 120.0),
        ("master", "outside:master", "one", "1970-01-02", "no_result", 1, 0, 1, 100, 40, 20, 0.25, 0, None, None),
        ("master", "outside:master", "one", "1970-01-02", "scored", 2, 1, 4, 300, 120, 60, 0.75, 1, 0.75, 360.0),
    ]
    assert rows(tmp_path, "SELECT serve_gpu_s > 0 FROM spending WHERE model = 'master'") == [(False,)]


def test_what_an_apprentice_is_worth(tmp_path: Path) -> None:
    """The newest day is that of the newest run, whenever the page is read."""

    def played(name: str, minutes: int, reward: float, asked: str = "master", **more: Any) -> list[Event]:
        at, of = 3 * DAY + minutes * 60_000_000, {"model": more.pop("model", "master"), "task": "one", "group": ""}
        return [opened(name, at=at, asked=asked, **of, **more), completed(name, opened_at=at, reward=reward, **of)]

    taken: dict[str, Any] = {"model": "m", "pinned": "m@3"}
    fill(
        tmp_path,
        *played("before", -2000, 1.0, asked=""),
        answered("before", 0),
        *played("masters", 0, 0.5),
        answered("masters", 0, cost_usd=0.75),
        *played("sure", 1, 1.0, **taken),
        exchange("sure", 0, 3),
        exchange("sure", 1, 3),
        *played("unsure", 2, 0.0, **taken),
        exchange("unsure", 0, 3, status="unsure"),
        answered("unsure", 1, model="m"),
        *played("policys own", 3, 0.0, asked="", model="m"),
        exchange("policys own", 0, 3),
    )
    found = rows(
        tmp_path,
        """SELECT trajectory, model, side, version, reward, calls, apprentice_calls, unsure_calls, instead_calls,
             cost_usd FROM takeovers ORDER BY opened_at""",
    )
    assert found == [
        ("before", "master", "master", None, 1.0, 1, 0, 0, 0, 0.25),
        ("masters", "master", "master", None, 0.5, 1, 0, 0, 0, 0.75),
        ("sure", "master", "apprentice", "m@3", 1.0, 2, 2, 0, 0, 0.0),
        ("unsure", "master", "apprentice", "m@3", 0.0, 1, 0, 1, 1, 0.25),
    ]
    with contextlib.closing(History(Config(run_dir=str(tmp_path)))) as history:
        (text,) = takeover_texts(history)
    assert text == (
        "The apprentice of master answered 50% of the 4 calls of the newest day. Its runs score 0.500 [0.000, 1.000] "
        "on 2 tasks, the master's 0.750 [0.000, 1.000] on 2 tasks. That day cost $1.00; by the master alone it would "
        "be $1.50."
    )


def test_own_compute_has_a_price_and_shadow_calls_take_time(tmp_path: Path) -> None:
    """Calls that one server answers at the same time share its seconds."""

    def at(begin: float, end: float) -> dict[str, Any]:
        when = 3 * DAY
        return {"started_at": when + int(begin * 1e6), "at": when + int(end * 1e6), "replica": "r"}

    first, last = run("a", "m", "one", 3, "scored", 1.0)
    fill(
        tmp_path,
        msgspec.structs.replace(first, asked="master", pinned="m@3"),
        exchange("a", 0, 3, **at(0, 10)),
        answered("a", 1, **{"model": "m", **at(20, 30)}),
        last,
        *run("b", "m", "two", 3, "scored", 0.0),
        exchange("b", 0, 3, **at(5, 20)),
        exchange("b", 0, 3, choice=1, **at(5, 20)),
        shadow("c", policy_version="m@3", **at(18, 24)),
    )
    for price, of_a, of_b in ((0.0, 0.25, 0.0), (3600.0, 10.25, 10.0)):
        config = Config(run_dir=str(tmp_path), store=StoreConfig(gpu_usd_h=price))
        with sql.connect(config) as connection:
            costs = connection.sql("SELECT task, sum(cost_usd), sum(gpu_s) FROM costs GROUP BY task ORDER BY task")
            assert costs.fetchall() == [("one", of_a, 10.0), ("two", of_b, 10.0)]
            assert connection.sql("SELECT trajectory, cost_usd FROM takeovers").fetchall() == [("a", of_a)]
            assert connection.sql("SELECT serve_gpu_s FROM spending").fetchall() == [(24.0,)]
        history = History(config)
        assert history.row("SELECT sum(cost_usd) AS usd FROM costs", {}) == {"usd": of_a + of_b}
        history.close()
