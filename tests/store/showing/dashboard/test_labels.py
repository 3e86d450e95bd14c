"""A person's label, from the page's form."""

from __future__ import annotations

import pytest

from store.showing.dashboard.errors import PageError
from store.showing.dashboard.labels import body


def test_scores_with_comments() -> None:
    made = body({"by": " ada ", "score:a": "1", "score:b:c": " 0.25", "score:d": "", "comment:a": "right"})
    assert made == {
        "labels": [
            {"trajectory": "a", "score": 1.0, "comment": "right"},
            {"trajectory": "b:c", "score": 0.25, "comment": ""},
        ],
        "ranked": False, "by": "ada", "source": "dashboard",
    }  # fmt: skip


def test_places_become_scores_in_the_same_order() -> None:
    made = body({"place:a": "3", "place:b": "1", "place:c": "3", "place:d": "2"})
    assert made["ranked"] is True
    assert {one["trajectory"]: one["score"] for one in made["labels"]} == {
        "a": 0.0,
        "b": 1.0,
        "c": 0.0,
        "d": 0.5,
    }
    assert {one["score"] for one in body({"place:a": "1", "place:b": "1"})["labels"]} == {1.0}


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({}, "Give at least one"),
        ({"score:a": "1.5"}, "from 0 to 1"),
        ({"score:a": "nan"}, "from 0 to 1"),
        ({"score:a": "x"}, "from 0 to 1"),
        ({"score:a": "1", "place:b": "1"}, "not both"),
        ({"place:a": "1"}, "at least two"),
        ({"place:a": "0", "place:b": "1"}, "from 1"),
        ({"place:a": "1.5", "place:b": "1"}, "from 1"),
        ({"score:a": "1", "comment:b": "why"}, "needs a score"),
    ],
)
def test_what_is_no_label_is_refused(form: dict[str, str], said: str) -> None:
    with pytest.raises(PageError, match=said) as caught:
        body(form)
    assert caught.value.status == 400
