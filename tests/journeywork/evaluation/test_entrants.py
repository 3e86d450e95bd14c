from __future__ import annotations

import pytest

from journeywork.evaluation.entrants import parse_entrant


@pytest.mark.parametrize("text", ["", "@1", "m@", "m@x", "http://h/v1", "https://h#"])
def test_what_names_nobody_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"names no model|is no entrant"):
        parse_entrant(text)
