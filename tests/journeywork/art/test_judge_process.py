"""The process of a program's judge."""

import sys

import pytest

from journeywork.art.rewards import judge_process

_NEVER_ANSWERS = """
import sys
sys.stdin.read()
"""


def started(monkeypatch: pytest.MonkeyPatch, program: str) -> judge_process.JudgeProcess:
    start = judge_process.subprocess.Popen
    monkeypatch.setattr(
        judge_process.subprocess, "Popen", lambda _, **pipes: start([sys.executable, "-c", program], **pipes)
    )
    return judge_process.JudgeProcess()


async def test_an_answer_that_never_comes_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_process, "_ANSWER_S", 0.2)
    monkeypatch.setattr(judge_process, "_process", started(monkeypatch, _NEVER_ANSWERS))
    try:
        with pytest.raises(ValueError, match="did not answer within"):
            await judge_process.ask_judge({}, {})
    finally:
        assert judge_process._process is not None
        judge_process._process.close()
