"""From choices, as client libraries give them, to the calls that they are of."""

from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

import journeywork.art as art
from journeywork.art.captured import is_captured, references_of
from journeywork.art.utils.litellm import convert_litellm_choice_to_openai

NAMED = {"trajectory": "t", "reply": "chatcmpl-1"}
FIELDS: dict[str, Any] = {
    "finish_reason": "stop",
    "index": 1,
    "message": {"role": "assistant", "content": "hi", "tool_calls": None},
}


class LitellmChoice:
    """A choice as litellm 1.106 gives it: what it does not know is in `provider_specific_fields`."""

    def __init__(self, extra: dict[str, Any] | None) -> None:
        self._extra = extra

    def model_dump(self) -> dict[str, Any]:
        message = {**FIELDS["message"], "provider_specific_fields": None}
        return {**FIELDS, "message": message, "provider_specific_fields": self._extra}


def of(*items: Any) -> art.Trajectory:
    return art.Trajectory(messages_and_choices=list(items))


def test_a_choice_of_openais_client() -> None:
    choice = Choice.model_validate({**FIELDS, "journeywork": NAMED})
    assert references_of(of(choice), "t") == [{**NAMED, "choice": 1}]
    assert references_of(of(choice, {"role": "user", "content": "u"}, choice), "t") == [{**NAMED, "choice": 1}]


def test_a_choice_of_litellm() -> None:
    choice = convert_litellm_choice_to_openai(LitellmChoice({"journeywork": NAMED}))
    assert (choice.message.content, references_of(of(choice), "t")) == ("hi", [{**NAMED, "choice": 1}])
    foreign = convert_litellm_choice_to_openai(LitellmChoice(None))
    assert not is_captured(of(foreign))


@pytest.mark.parametrize("named", [None, "t", {"trajectory": "t"}])
def test_what_is_no_reference(named: object) -> None:
    choice = Choice.model_validate({**FIELDS, "journeywork": named})
    assert not is_captured(of(choice))
    with pytest.raises(art.NotCapturedError, match=r"here: messages_and_choices\[0\]"):
        references_of(of(choice), "here")


def test_a_trajectory_with_one_foreign_choice_is_not_captured() -> None:
    ours = Choice.model_validate({**FIELDS, "journeywork": NAMED})
    assert is_captured(of(ours))
    assert not is_captured(of(ours, Choice.model_validate(FIELDS)))
    assert not is_captured(of({"role": "assistant", "content": "x"}))
