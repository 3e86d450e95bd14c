"""Conversations that the model did not have, such as those of a data set: which of their tokens are trained.

Each reply of the assistant is a call: its prompt is what the chat template renders of the messages before it, and its
tokens are those that the template adds for the reply. Messages of users, of the system and of tools are context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple


class UntrainableReplyError(ValueError):
    """The chat template changes a reply's prompt once the reply follows it."""


class DemonstratedReply(NamedTuple):
    """A reply, and the requests for what the chat template renders of it."""

    place: int
    """Place of the reply among the messages."""
    message: dict[str, Any]
    request: dict[str, Any]
    """The messages before the reply, and the tools."""

    @property
    def prompt(self) -> dict[str, Any]:
        """The request for the tokens of the reply's prompt."""
        return {**self.request, "add_generation_prompt": True}

    @property
    def whole(self) -> dict[str, Any]:
        """The request for the tokens of prompt and reply."""
        messages = [*self.request["messages"], self.message]
        return {**self.request, "messages": messages, "add_generation_prompt": False}

    def reply_ids(self, prompt_ids: list[int], whole_ids: list[int]) -> list[int]:
        """Return the reply's tokens, given those of `prompt` and of `whole`. Raises `UntrainableReplyError`."""
        begin = len(prompt_ids)
        if whole_ids[:begin] != prompt_ids or len(whole_ids) == begin:
            raise UntrainableReplyError(
                f"the model's chat template renders another prompt once message {self.place} follows it, so the "
                "message can't be trained. End the conversation before it, or use another template"
            )
        return whole_ids[begin:]


def demonstrated_replies(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
) -> Iterator[DemonstratedReply]:
    """Yield the replies of a conversation, in their order. A first message of the assistant is none: it has no
    prompt."""
    for place, message in enumerate(messages):
        if place and message.get("role") == "assistant":
            request = {"messages": list(messages[:place]), **({"tools": list(tools)} if tools else {})}
            yield DemonstratedReply(place, message, request)
