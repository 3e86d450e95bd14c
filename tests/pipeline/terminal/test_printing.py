"""What agents wrote acts on no terminal."""

import os
import subprocess
import sys

import pytest

from pipeline.terminal.printing import visible, visible_json, with_code


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("over\rwritten\x08", "over\\rwritten\\x08"),
        ("\x9b31m\x7f", "\\x9b31m\\x7f"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("two\nlines\tand é 中 👩‍💻 \\x1b", "two\nlines\tand é 中 👩‍💻 \\x1b"),
    ],
)
def test_what_a_terminal_acts_on_is_shown_as_its_escape(text: str, shown: str) -> None:
    assert visible(text) == shown


_PRINTS = """
import sys
from pipeline.terminal.printing import Output
console = Output()
for line in sys.stdin:
    console.print(line)
sys.stderr.write("alive")
"""


@pytest.mark.parametrize("full", [False, True], ids=["the reader has left", "the disk is full"])
def test_a_program_goes_on_when_its_output_can_t_be_written(full: bool) -> None:
    """Regression: `journeywork up | reader` ended with exit 1 and an empty stderr at the line after the reader left."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(os.open("/dev/full", os.O_WRONLY) if full else writing, "wb") as output:
        done = subprocess.run(
            [sys.executable, "-c", _PRINTS], input=b"a\nb\n", stdout=output, stderr=subprocess.PIPE, timeout=60
        )
    assert (done.returncode, done.stderr) == (0, b"alive")


def test_json_stays_the_same_data() -> None:
    shown = visible_json('{"a": "\x9b31m\x7f é\u202e"}\n')
    assert shown == '{"a": "\\u009b31m\\u007f é\\u202e"}\n'


def test_code_is_bold_and_loses_its_backticks() -> None:
    told = with_code("run `a b`\x1b now")
    assert (told.plain, [(s.start, s.end, s.style) for s in told.spans]) == ("run a b\\x1b now", [(4, 7, "bold")])
