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
"""No text has so many on average: a prompt with more of them for each token that the model takes is not tokenized."""


class HintUnusableError(ValueError):
    """A hint can't be put into a call's prompt; the message says why."""


@contextlib.contextmanager
def _malformed_as_unusable() -> Iterator[None]:
    """Raise `HintUnusableError` in place of the errors that a malformed request causes: agents write requests, and none
    may end the trainer."""
    try:
        yield
    except HintUnusableError:  # a `ValueError` that says why already
        raise
    except MALFORMED as error:
        raise HintUnusableError(f"the call's messages are not those of a chat: {type(error).__name__}") from error


def best_run(members: Sequence[Member], least: float | None) -> Member | None:
    """The member with the highest reward, the first of several; `None` if that is below `least`, or `least` is
    `None`."""
    best = max(members, key=lambda member: member.reward, default=None)
    return None if best is None or least is None or best.reward < least else best


def is_better(run: Member, other: Member) -> bool:
    """Whether a run has a higher reward, by more than the tolerance by which rewards count as equal."""
    return run.reward > other.reward + REWARD_TOLERANCE


@_malformed_as_unusable()
def transcript(exchanges: Sequence[ExchangeRecorded]) -> str:
    """A run as text: its reply if it made one call, else what followed the messages of its first call, each message
    under its role. Where a later call does not go on from the first, only the last reply is known to belong to it.

    Raises `HintUnusableError` for calls that are no chat."""
    first, last = _messages(exchanges[0]), _messages(exchanges[-1])
    try:
        reply = msgspec.json.decode(exchanges[-1].response)["choices"][0]["message"]
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise HintUnusableError("the group's best run has no chat reply to show") from error
    followed = last[len(first) :] if last[: len(first)] == first else []
    parts = [(m["role"], _as_text(m)) for m in [*followed, as_template_reads(reply)]]
    return parts[0][1] if len(parts) == 1 else "\n\n".join(f"{role}: {text}" for role, text in parts)


class HintedPrompts:
    """Renders prompts for the base model in the folder or of the hub name `base`. `longest`: tokens that the trainer's
    model takes; `None`: any number. A trainer sets it, because callers choose how long their hints and calls are."""

    def __init__(self, base: str, config: DistillConfig, longest: int | None = None) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(base)
        self.config, self._longest = config, longest

    def text_of(self, hints: Sequence[Hint]) -> str:
        """What is appended to the user's message for these hints."""
        templates = {"text": self.config.hint_template, "correction": self.config.correction_template}
        return "".join(templates[hint.kind].replace("{hint}", hint.text) for hint in hints)

    @_malformed_as_unusable()
    def render(self, exchange: ExchangeRecorded, text: str) -> npt.NDArray[np.int32]:
        """The token ids of the call's prompt with `text` at the end of its last user message.

        Raises `HintUnusableError` for a call without messages, for messages that the template refuses, and for a prompt
        that is too long for the model."""
        body = msgspec.json.decode(exchange.request)
        messages = _messages(exchange)
        asked = next((m for m in reversed(messages) if m["role"] == "user"), None)
        continued = messages.pop() if body.get("continue_final_message") else None
        if continued is not None and continued is asked:
            raise HintUnusableError("the call continues the user's message, so no hint can stand at its end")
        if asked is None:
            messages.append({"role": "user", "content": text.lstrip()})
        else:
            asked["content"] = (asked["content"] or "") + text
        messages += [continued] if continued is not None else []
        try:
            prompt = self._tokenizer.apply_chat_template(
                messages, tools=body.get("tools") or None, tokenize=False, **_template_arguments(body)
            )
        except (ArithmeticError, jinja2.TemplateError, TypeError, ValueError) as error:
            told = without_sent(str(error), exchange.request.decode(errors="replace") + text)
            raise HintUnusableError(f"the model's chat template refuses the call's messages: {told}") from error
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
    """The values of a request that a template reads. A field of the request counts before `chat_template_kwargs`, as in
    the inference server."""
    given = body.get("chat_template_kwargs") or {}
    effort = body.get("reasoning_effort")
    fields = {
        "add_generation_prompt": body.get("add_generation_prompt", True),
        "continue_final_message": body.get("continue_final_message", False),
        "documents": body.get("documents"),
        "reasoning_effort": effort,
        # The server derives it from the effort, unless the request gives it: effort `none` turns thinking off.
        "enable_thinking": None if effort is None or "enable_thinking" in given else effort != "none",
    }
    # `None` and `auto` are as good as not given there.
    return {**given, **{name: value for name, value in fields.items() if value not in (None, "auto")}}


def _messages(exchange: ExchangeRecorded) -> list[Message]:
    messages = msgspec.json.decode(exchange.request).get("messages")
    if not isinstance(messages, list) or not messages:
        raise HintUnusableError("the call sent no messages: a hint needs a chat to stand in")
    return [as_template_reads(message) for message in messages]


def _as_text(message: Message) -> str:
    """The content of a message, with its tool calls as JSON."""
    calls = [msgspec.json.encode(call["function"]).decode() for call in message.get("tool_calls") or ()]
    return "\n".join([*([message["content"]] if message.get("content") else []), *calls])


def as_template_reads(message: Message) -> Message:
    """A message as the inference server gives it to the template: parts of text joined, arguments of tool calls as
    objects, reasoning under both of its names. Raises `HintUnusableError` for content that is no text."""
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
    """A tool call whose arguments, JSON text in requests, are the object that templates read. Raises
    `HintUnusableError`."""
    function = dict(call.get("function") or {})
    if isinstance(arguments := function.get("arguments"), str):
        try:
            function["arguments"] = msgspec.json.decode(arguments or "{}")
        except msgspec.DecodeError as error:
            raise HintUnusableError("arguments of a tool call are no JSON") from error
    return {**call, "function": function}
