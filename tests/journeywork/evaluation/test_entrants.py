from __future__ import annotations

import pytest

from journeywork.evaluation.entrants import Entrant, parse_entrant


@pytest.mark.parametrize(
    ("text", "entrant"),
    [
        ("m", Entrant("m", "policy", "m")),
        ("m@12", Entrant("m@12", "policy", "m", "m@12")),
        ("m@base", Entrant("m@base", "policy", "m", "m@0")),
        ("http://h/v1/#a/b", Entrant("http://h/v1/#a/b", "external", "a/b", url="http://h/v1")),
    ],
)
def test_an_entrant_is_read_from_its_name(text: str, entrant: Entrant) -> None:
    assert parse_entrant(text) == entrant


@pytest.mark.parametrize("text", ["", "@1", "m@", "m@x", "http://h/v1", "https://h#"])
def test_what_names_nobody_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"names no model|is no entrant"):
        parse_entrant(text)
