"""The process of a program's judge."""

from __future__ import annotations

import sys

import pytest

from journeywork.art.rewards import judge_process

_NOISY = """
import json, sys
for line in sys.stdin:
    print("Give feedback", "[]", '{"id": 99}', '{"id": %d}' % json.loads(line)["id"], sep="\\n", flush=True)
"""


def test_lines_that_are_no_answers_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    start = judge_process.subprocess.Popen
    monkeypatch.setattr(
        judge_process.subprocess, "Popen", lambda _, **pipes: start([sys.executable, "-c", _NOISY], **pipes)
    )
    process = judge_process.JudgeProcess()
    try:
        assert process.ask({}, {}).result(timeout=60) == {"id": 0}
    finally:
        process.close()
