"""A call's prompt with a hint in it, as the teacher reads it.

The hint stands at the end of the call's last user message, where OpenClaw-RL (arXiv 2603.10165) and SDPO (arXiv
2601.20802) put it. The messages are those that the agent sent (`rollout.exchange`), rendered by the model's own chat
template with the request's tools and template arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2
import msgspec
import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from pipeline.config import DistillConfig
from pipeline.events import ExchangeRecorded, Hint

Message = dict[str, Any]


class HintUnusableError(ValueError):
    """A hint can't be put into a call's prompt; the message says why."""


class HintedPrompts:
    """Renders prompts for the base model in the folder or of the hub name `base`."""

    def __init__(self, base: str, config: DistillConfig) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(base)
        self._config = config

    def text_of(self, hints: Sequence[Hint]) -> str:
        """What is appended to the user's message for these hints."""
        templates = {"text": self._config.hint_template, "correction": self._config.correction_template}
        return "".join(templates[hint.kind].replace("{hint}", hint.text) for hint in hints)

    def render(self, exchange: ExchangeRecorded, text: str) -> npt.NDArray[np.int32]:
        """The token ids of the call's prompt with `text` at the end of its last user message.

        Raises `HintUnusableError` for a call without messages, and for messages that the template refuses."""
        body = msgspec.json.decode(exchange.request)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise HintUnusableError("the call sent no messages: a hint needs a chat to stand in")
        messages = [_as_template_reads(message) for message in messages]
        asked = next((m for m in reversed(messages) if m["role"] == "user"), None)
        if asked is None:
            messages.append({"role": "user", "content": text.lstrip()})
        else:
            asked["content"] = (asked["content"] or "") + text
        try:
            prompt = self._tokenizer.apply_chat_template(
                messages, tools=body.get("tools") or None, tokenize=False,
                add_generation_prompt=body.get("add_generation_prompt", True),
                **(body.get("chat_template_kwargs") or {}),
            )  # fmt: skip
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise HintUnusableError(
                f"the model's chat template refuses the call's messages: {error}"
            ) from error
        return np.array(self._tokenizer(prompt, add_special_tokens=False).input_ids, np.int32)


def _as_template_reads(message: Message) -> Message:
    """A message as the inference server gives it to the template: parts of text joined, arguments of tool calls as
    objects. Raises `HintUnusableError` for content that is no text."""
    out = dict(message)
    if isinstance(content := message.get("content"), list):
        if any(part.get("type") != "text" for part in content):
            raise HintUnusableError("the call has content other than text")
        out["content"] = "\n".join(part["text"] for part in content)
    if calls := message.get("tool_calls"):
        out["tool_calls"] = [_with_object(call) for call in calls]
    return out


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(arguments := function.get("arguments"), str):
        try:
            function["arguments"] = msgspec.json.decode(arguments or "{}")
        except msgspec.DecodeError as error:
            raise HintUnusableError(f"arguments of a tool call are no JSON: {error}") from error
    return {**call, "function": function}
