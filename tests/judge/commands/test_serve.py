"""`journeywork judge serve` as a process, without a judge model."""

import json
import subprocess
import sys

import pytest

from judge.commands import serve
from judge.labelled import GroupFile
from judge.scoring import GroupRewards

pytestmark = pytest.mark.timeout(300)


def test_a_request_that_can_not_be_read_is_answered_and_a_reader_that_left_ends_it_quietly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "judge.commands.main", "serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        for line in (b'{"id": 3, "group": {"reward": NaN}}', b'{"id": 4, "groups": []}', b"no json"):
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            assert answer["scores"] == {}
            assert "the request can't be read" in answer["error"]
            assert answer["id"] == {b"3": 3, b"4": 4}.get(line[7:8])
        process.stdout.close()
        process.stdin.write(b"no json\n")
        process.stdin.flush()
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_an_answer_is_a_line_of_characters_that_no_terminal_acts_on() -> None:
    assert serve._failure_line(1, "a\u009b2J \udc80") == b'{"id":1,"scores":{},"error":"a\\u009b2J \xef\xbf\xbd"}\n'


async def test_an_answer_that_no_json_can_hold_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Otherwise the program that sent the group would wait for ever."""

    async def score(*_: object) -> GroupRewards:
        return GroupRewards({}, {}, (), missing="\ud83d")

    monkeypatch.setattr(serve, "score_group", score)
    await serve._answer(serve.Request(5, GroupFile([])))
    assert json.loads(capfdbinary.readouterr().out)["error"].startswith("UnicodeEncodeError")
    assert serve._read_id(b'{"id": "\\ud83d"}') is serve._read_id(b'{"id": 1%s}' % (b"0" * 30)) is None
