from __future__ import annotations

import pytest

from journeywork.evaluation.entrants import Entrant, Price, parse_entrant, parse_price


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


def test_a_price_is_per_million_tokens() -> None:
    assert parse_price("http://h#m=x=0.1/2") == ("http://h#m=x", Price(0.1, 2.0))
    with pytest.raises(ValueError, match="'m=1' is no price"):
        parse_price("m=1")
