"""Choices of litellm as those of OpenAI's client.

A program may call its model through the library litellm, whose answers have classes of their own. A trajectory holds
choices of OpenAI's client, with the reference to the recorded call in an additional field."""

from __future__ import annotations

from typing import Any

from openai.types.chat.chat_completion import Choice

from journeywork.art.captured import REFERENCE


def convert_litellm_choice_to_openai(litellm_choice: Any) -> Choice:
    """Return a choice of `litellm.completion` as OpenAI's client returns it, with the reference to its recorded
    call."""
    fields: dict[str, Any] = litellm_choice.model_dump()
    # Where litellm puts fields that OpenAI's choices do not have, such as the reference.
    extra = fields.pop("provider_specific_fields", None) or {}
    fields["message"].pop("provider_specific_fields", None)
    if REFERENCE in extra:
        fields[REFERENCE] = extra[REFERENCE]
    logprobs = fields.get("logprobs")
    if logprobs is not None and not logprobs.get("content"):
        fields["logprobs"] = None
    return Choice.model_validate(fields)
