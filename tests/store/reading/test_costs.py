"""The view `costs`, and what else the history says of outside models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.events import Event, TrajectoryCompleted, TrajectoryOpened
from tests.store.kit import exchange, fill, scored
from tests.store.reading.test_sql import rows

DAY = 86_400_000_000
OUTSIDE: dict[str, Any] = {
    "policy_version": "outside:master",
    "prompt_ids": b"",
    "sampled_ids": b"",
    "logprobs": b"",
    "replica": "http://x",
    "input_tokens": 100,
    "cached_tokens": 40,
    "output_tokens": 20,
    "cost_usd": 0.25,
}


def run(name: str, model: str, task: str, day: int, outcome: Any, reward: float | None = None) -> list[Event]:
    opened = TrajectoryOpened(project="p", trajectory=name, model=model, group="g", task=task, at=day * DAY)
    end: dict[str, Any] = {"outcome": outcome, "reward": reward, "at": day * DAY + 1}
    return [opened, TrajectoryCompleted(project="p", trajectory=name, model=model, group="g", task=task, **end)]


def test_money_and_tokens_per_solved_run_whoever_answered(tmp_path: Path) -> None:
    def answered(name: str, seq: int, **more: Any) -> Event:
        return exchange(name, seq, -1, **{**OUTSIDE, "model": "master", **more})

    fill(
        tmp_path,
        [
            *run("a", "master", "one", 1, "scored", 1.0),
            answered("a", 0),
            answered("a", 1, choice=0),
            answered("a", 1, choice=1, input_tokens=0, cached_tokens=0, output_tokens=0, cost_usd=None),
            *run("b", "master", "one", 1, "scored"),
            answered("b", 0),
            answered("b", 1, status="failed", input_tokens=0, cached_tokens=0, output_tokens=0, cost_usd=None),
            *run("c", "master", "one", 1, "no_result"),
            answered("c", 0),
            *run("d", "m", "one", 2, "scored", 1.0),
            exchange("d", 0, 3, model="m"),
            answered("d", 1, model="m"),
            *run("e", "m", "two", 2, "scored", 0.0),
            exchange("e", 0, 3),
            exchange("e", 0, 3, copied_from="x/0", choice=1),
            scored("g", {"b": 0.0}),
        ],
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
