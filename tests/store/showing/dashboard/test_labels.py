"""A person's label, from the page's form."""

from __future__ import annotations

import pytest

from store.showing.dashboard.errors import PageError
from store.showing.dashboard.labels import bodies


def test_scores_with_comments() -> None:
    common = {"name": "label", "source": "dashboard"}
    made = bodies({"score:a": "1", "score:b:c": " 0.25", "score:d": "", "comment:a": "right"})
    assert made == {"a": {**common, "value": 1.0, "text": "right"}, "b:c": {**common, "value": 0.25, "text": ""}}


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({}, "Give at least one"),
        ({"score:a": "1.5"}, "from 0 to 1"),
        ({"score:a": "nan"}, "from 0 to 1"),
        ({"score:a": "x"}, "from 0 to 1"),
        ({"score:a": "1", "comment:b": "why"}, "needs a score"),
    ],
)
def test_what_is_no_label_is_refused(form: dict[str, str], said: str) -> None:
    with pytest.raises(PageError, match=said) as caught:
        bodies(form)
    assert caught.value.status == 400
