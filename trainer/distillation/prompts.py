"""A call's prompt with a hint in it, as the teacher reads it.

A hint is what a user or a judge said of a call, or the group's best run. It stands at the end of the call's last user
message, where OpenClaw-RL (arXiv 2603.10165) and SDPO (arXiv 2601.20802) put it. The messages are those that the agent
sent (`rollout.exchange`), rendered by the model's own chat template with the request's tools, documents, reasoning
effort and template arguments. A call that continues the last message (`continue_final_message`) leaves it open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jinja2
import msgspec
import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from pipeline.config import DistillConfig
from pipeline.errors import MALFORMED, without_sent
from pipeline.events import ExchangeRecorded, Hint, Member, unpack_ids
from pipeline.events.types import REWARD_TOLERANCE

Message = dict[str, Any]
_CHARACTERS_PER_TOKEN = 16
"""A prompt with more characters for each token that the model takes is refused before it is tokenized: no text has so
many characters in a token on average."""


class HintUnusableError(ValueError):
    """A hint can't be put into a call's prompt; the message says why."""


@contextlib.contextmanager
def _malformed_as_unusable() -> Iterator[None]:
    """Raise `HintUnusableError` in place of the errors that a malformed request causes. Agents write the requests,
    which must not end the trainer."""
    try:
        yield
    except HintUnusableError:  # a `ValueError` that says why already
        raise
    except MALFORMED as error:
        raise HintUnusableError(f"the call's messages are not those of a chat: {type(error).__name__}") from error


def best_run(members: Sequence[Member], least: float | None) -> Member | None:
    """Return the member with the highest reward, the first of several; `None` if its reward is below `least`, or if
    `least` is `None`."""
    best = max(members, key=lambda member: member.reward, default=None)
    return None if best is None or least is None or best.reward < least else best


def is_better(run: Member, other: Member) -> bool:
    """Whether a run has a higher reward, by more than the tolerance by which rewards count as equal."""
    return run.reward > other.reward + REWARD_TOLERANCE


@_malformed_as_unusable()
def transcript(exchanges: Sequence[ExchangeRecorded]) -> str:
    """Return a run as text: its reply if it made one call, else what followed the messages of its first call, each
    message under its role. If the last call does not continue the first one's messages, only the last reply is used.

    Raises `HintUnusableError` for calls that are no chat."""
    first, last = _messages(exchanges[0]), _messages(exchanges[-1])
    try:
        reply = msgspec.json.decode(exchanges[-1].response)["choices"][0]["message"]
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise HintUnusableError("the group's best run has no chat reply to show") from error
    later = last[len(first) :] if last[: len(first)] == first else []
    parts = [(m["role"], _as_text(m)) for m in [*later, as_template_reads(reply)]]
    return parts[0][1] if len(parts) == 1 else "\n\n".join(f"{role}: {text}" for role, text in parts)


class HintedPrompts:
    """Renders a teacher's prompts for the base model `base`, a folder or hub name. `longest`: limit on the tokens of a
    prompt and its reply, `None` for no limit. The trainer sets it, because callers choose the length of hints."""

    def __init__(self, base: str, config: DistillConfig, longest: int | None = None) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(base)
        self.config, self._longest = config, longest

    def text_of(self, hints: Sequence[Hint]) -> str:
        """Return the text that is appended to the user's message for these hints."""
        templates = {"text": self.config.hint_template, "correction": self.config.correction_template}
        return "".join(templates[hint.kind].replace("{hint}", hint.text) for hint in hints)

    @_malformed_as_unusable()
    def render(self, exchange: ExchangeRecorded, text: str) -> npt.NDArray[np.int32]:
        """Return the token ids of the call's prompt with `text` at the end of its last user message. Without a user
        message, `text` becomes one.

        Raises `HintUnusableError` for a call without messages, for messages that the template refuses, and for a prompt
        that is too long for the model."""
        body = msgspec.json.decode(exchange.request)
        messages = _messages(exchange)
        user_message = next((m for m in reversed(messages) if m["role"] == "user"), None)
        open_message = messages.pop() if body.get("continue_final_message") else None
        if open_message is not None and open_message is user_message:
            raise HintUnusableError("the call continues the user's message, so no hint can stand at its end")
        if user_message is None:
            messages.append({"role": "user", "content": text.lstrip()})
        else:
            user_message["content"] = (user_message["content"] or "") + text
        messages += [open_message] if open_message is not None else []
        try:
            prompt = self._tokenizer.apply_chat_template(
                messages, tools=body.get("tools") or None, tokenize=False, **_template_arguments(body)
            )
        except (ArithmeticError, jinja2.TemplateError, TypeError, ValueError) as error:
            reason = without_sent(str(error), exchange.request.decode(errors="replace") + text)
            raise HintUnusableError(f"the model's chat template refuses the call's messages: {reason}") from error
        if self._longest is not None and len(prompt) > self._longest * _CHARACTERS_PER_TOKEN:
            raise HintUnusableError(
                f"the teacher's prompt has {len(prompt)} characters, the trainer's model takes {self._longest} tokens"
            )
        ids = np.array(self._tokenizer(prompt, add_special_tokens=False).input_ids, np.int32)
        tokens = len(ids) + len(unpack_ids(exchange.sampled_ids))
        if self._longest is not None and tokens > self._longest:
            raise HintUnusableError(
                f"the teacher's prompt and the reply are {tokens} tokens, the trainer's model takes {self._longest}"
            )
        return ids


def _template_arguments(body: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a request that a template reads. A field of the request counts before
    `chat_template_kwargs`, as in the inference server."""
    template_kwargs = body.get("chat_template_kwargs") or {}
    effort = body.get("reasoning_effort")
    fields = {
        "add_generation_prompt": body.get("add_generation_prompt", True),
        "continue_final_message": body.get("continue_final_message", False),
        "documents": body.get("documents"),
        "reasoning_effort": effort,
        # The server derives it from the effort, unless the request gives it: effort `none` turns thinking off.
        "enable_thinking": None if effort is None or "enable_thinking" in template_kwargs else effort != "none",
    }
    # The server takes `None` and `auto` as if the field were missing.
    return {**template_kwargs, **{name: value for name, value in fields.items() if value not in (None, "auto")}}


def _messages(exchange: ExchangeRecorded) -> list[Message]:
    """Return the messages of a call as the template reads them. Raises `HintUnusableError` if it sent none."""
    messages = msgspec.json.decode(exchange.request).get("messages")
    if not isinstance(messages, list) or not messages:
        raise HintUnusableError("the call sent no messages: a hint needs a chat to stand in")
    return [as_template_reads(message) for message in messages]


def _as_text(message: Message) -> str:
    """Return the content of a message as text, followed by its tool calls as JSON."""
    calls = [msgspec.json.encode(call["function"]).decode() for call in message.get("tool_calls") or ()]
    return "\n".join([*([message["content"]] if message.get("content") else []), *calls])


def as_template_reads(message: Message) -> Message:
    """Return a message as the inference server gives it to the template: parts of text joined, arguments of tool calls
    as objects, reasoning under both of its names. Raises `HintUnusableError` for content that is no text."""
    out = dict(message)
    if (thoughts := message.get("reasoning", message.get("reasoning_content"))) is not None:
        out["reasoning"] = out["reasoning_content"] = thoughts
    if isinstance(content := message.get("content"), list):
        if any(part.get("type") != "text" for part in content):
            raise HintUnusableError("the call has content other than text")
        out["content"] = "\n".join(part["text"] for part in content)
    if calls := message.get("tool_calls"):
        out["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return out


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments, JSON text in requests, decoded to the object that templates read. Raises
    `HintUnusableError` if they are no JSON."""
    function = dict(call.get("function") or {})
    if isinstance(arguments := function.get("arguments"), str):
        try:
            function["arguments"] = msgspec.json.decode(arguments or "{}")
        except msgspec.DecodeError as error:
            raise HintUnusableError("arguments of a tool call are no JSON") from error
    return {**call, "function": function}
