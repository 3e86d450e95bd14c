"""What `journeywork eval` prints."""

from journeywork.evaluation.entrants import parse_entrant
from journeywork.evaluation.report import text_report
from journeywork.evaluation.results import EntrantResult, EvaluationReport, TaskResult
from journeywork.trajectory import Usage


def played(name: str, more: float, *errors: str) -> EntrantResult:
    values = [{"reward": n / 10 + more * n, "win": float(n % 2)} for n in range(6)]
    tasks = tuple(TaskResult(f"task {n}", value, 1, 0) for n, value in enumerate(values))
    return EntrantResult(parse_entrant(name), name, tasks, Usage(6, 60, 6, 3.0), (0.1, 0.2), 2.0, errors)


def test_means_differences_errors_and_times_are_shown() -> None:
    entrants = (played("m@0", 0.0), played("m@9", 0.1, "KeyError: 'x'", "KeyError: 'x'", "TypeError: y"))
    text = text_report(EvaluationReport("e-1", "s:tasks", "s:play", entrants))
    lines = text.splitlines()
    assert lines[0].split()[:2] == ["measure", "entrant"]
    assert len(lines[: lines.index("")]) == 5  # a measure and an entrant each
    assert lines[2].split()[:3] == ["reward", "m@9", "0.500"]
    assert "+0.250" in lines[2]
    assert not lines[2].endswith("*")
    assert "m@9: 2 runs failed: KeyError: 'x'" in lines
    assert "no reward" not in text
    assert lines[-1].split()[0] == "m@9"
