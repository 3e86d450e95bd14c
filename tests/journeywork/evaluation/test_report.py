"""The pages of an evaluation."""

from __future__ import annotations

import re

from journeywork.evaluation.entrants import parse_entrant
from journeywork.evaluation.report import markdown_page, text_table
from journeywork.evaluation.results import EntrantResult, EvaluationReport, TaskResult
from journeywork.trajectory import Usage

EVIL = "<script>alert(1)</script>|`x`"


def report() -> EvaluationReport:
    def played(name: str, more: float) -> EntrantResult:
        tasks = tuple(
            TaskResult(
                EVIL if n == 3 else f"task {n}", {"reward": n / 10 + more * n, "win": float(n % 2)}, 1, 0
            )
            for n in range(6)
        )
        return EntrantResult(
            parse_entrant(name), name, tasks, Usage(6, 60, 6, 3.0, 0.25), (0.1, 0.2), 2.0, (EVIL,)
        )

    entrants = (played("m@0", 0.0), played("m@9", 0.1), played(f"litellm:{EVIL}", -0.1))
    return EvaluationReport(
        "e-1", "s:tasks", "s:play", entrants, "2026-01-01T00:00:00+00:00", {"attempts": 1, "tasks": 6}
    )


def test_the_page_has_whole_tables_and_escapes_names() -> None:
    page = markdown_page(report())
    for line in page.splitlines():
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.strip("|"))
            assert len(cells) in (3, 4, 11)
    assert "| reward | m@9 | 0.500 [" in page
    assert "\\<script\\>" in page
    assert "| task 5 | 0.5 | 1 | +0.5 |" in page


def test_a_terminal_gets_the_means() -> None:
    lines = text_table(report()).splitlines()
    assert lines[0].split()[:2] == ["measure", "entrant"]
    assert len(lines) == 7


def test_tasks_without_a_reward_are_told() -> None:
    assert not any("no reward" in page for page in (text_table(report()), markdown_page(report())))
    tasks = tuple(TaskResult(f"task {n}", {"reward": 1.0} if n else {}, 1, 0) for n in range(3))
    played = EntrantResult(parse_entrant("m@0"), "m@0", tasks, Usage(), (), 2.0)
    none = EntrantResult(
        parse_entrant("m@9"), "m@9", tuple(TaskResult(t.task, {}, 1, 0) for t in tasks), Usage(), (), 2.0
    )
    partial = EvaluationReport("e-1", "s:tasks", "s:play", (played, none), "", {"attempts": 1, "tasks": 3})
    for page in (text_table(partial), markdown_page(partial)):
        assert "m@0: 1 of 3 tasks has no reward;" in page
        assert "m@9: 3 of 3 tasks have no reward;" in page
