"""A person's labels and corrections, from the pages' forms."""

from collections.abc import Callable

import pytest

from store.showing.dashboard.labels import correction, feedback_of_scores
from store.showing.pages.errors import PageError


def test_scores_with_comments() -> None:
    common = {"name": "label", "source": "dashboard"}
    made = feedback_of_scores({"score:a": "1", "score:b:c": " 0.25", "score:d": "", "comment:a": "right"})
    assert made == {"a": {**common, "value": 1.0, "text": "right"}, "b:c": {**common, "value": 0.25, "text": ""}}


def test_a_correction_is_the_same_signal_when_its_form_is_sent_again() -> None:
    made = correction({"call": "3", "correction": " Dear Bob,\r\nno. "})
    key = made.pop("key")
    assert made == {"name": "healing", "source": "dashboard", "call": 3, "correction": "Dear Bob,\nno."}
    assert correction({"call": "3", "correction": "Dear Bob,\nno."})["key"] == key
    others = ({"call": "4", "correction": "Dear Bob,\nno."}, {"call": "3", "correction": "no"})
    assert key not in [correction(other)["key"] for other in others]


@pytest.mark.parametrize(
    ("read", "form", "said"),
    [
        (feedback_of_scores, {}, "Give at least one"),
        (feedback_of_scores, {"score:a": "1.5"}, "from 0 to 1"),
        (feedback_of_scores, {"score:a": "nan"}, "from 0 to 1"),
        (feedback_of_scores, {"score:a": "x"}, "from 0 to 1"),
        (feedback_of_scores, {"score:a": "1", "comment:b": "why"}, "needs a score"),
        (correction, {"correction": "b2"}, "number of a call"),
        (correction, {"call": "-1", "correction": "b2"}, "number of a call"),
        (correction, {"call": "0", "correction": " \n"}, "Write the answer"),
    ],
)
def test_what_is_no_label_or_correction_is_refused(
    read: Callable[[dict[str, str]], object], form: dict[str, str], said: str
) -> None:
    with pytest.raises(PageError, match=said) as caught:
        read(form)
    assert caught.value.status == 400
