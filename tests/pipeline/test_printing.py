"""What agents wrote acts on no terminal."""

from __future__ import annotations

import pytest

from pipeline.printing import visible


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
