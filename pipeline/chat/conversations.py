"""All parts of a trajectory that are trained on, as conversations, for judges and data sets.

The trainer learns from every complete reply of every call that is no side call (one that its agent excludes from
training). One conversation does not hold all of
them: a call with `n > 1` has several replies, sub-agents have conversations of their own, and an agent that shortens
its history drops earlier messages. So a trajectory is a list of conversations, in the order in which they began. A
call continues the longest conversation with which its request begins, message by message; any other call begins a new
one.

An agent may send a reply back without its reasoning, or with other empty fields. Such a reply still counts as the
same message, and the conversation keeps it as it was sampled: messages are compared by a *key* (`_content_key`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from pipeline.chat.images import image_name, image_of
from pipeline.events import ExchangeRecorded

Message = dict[str, Any]
_PROMPT = "prompt"
"""Role under which a plain completion's prompt is shown."""
_OWN = ("assistant", "system", "developer")
"""Roles of messages that no follow-up consists of alone: they say nothing about what a reply led to."""
_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_raw_list = msgspec.json.Decoder(list[msgspec.Raw])


class Reply(NamedTuple):
    """A whole reply of the model in a conversation, to a call that had no other."""

    call: int
    """`seq` of the call."""
    place: int
    """Place of its message in the conversation."""
    stop: int = 0
    """Place behind the messages that the conversation's next call sent after it; 0 if there was none."""
    role: str = ""
    """The agent that made the call, in a run of several."""


@dataclass(frozen=True)
class Conversation:
    """A list of messages, each sent after all those before it."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    calls: str = ""
    """The model calls of the trajectory that it holds, counted from 1: `calls 1 to 3`, or `call 2, choice 2 of call
    2`."""
    replies: tuple[Reply, ...] = ()
    """In the order of the messages, those of calls with one choice."""
    sampled: tuple[int, ...] = ()
    """Places of all messages that the model wrote in these calls. Others of the role `assistant` came with a prompt."""

    def follow_up(self, reply: Reply) -> tuple[Message, ...]:
        """Return the messages that the conversation's next call sent behind a reply. It is empty unless a user, a tool
        or another source than the agent's own program wrote one of them."""
        after = self.messages[reply.place + 1 : reply.stop]
        return after if any(m.get("role") not in _OWN for m in after) else ()


@dataclass(frozen=True)
class _KeyedMessage:
    """A message. Two that say the same are equal, because they have the same key."""

    message: Message = field(compare=False)
    key: int


@dataclass
class _OpenConversation:
    """A conversation that later calls may continue."""

    number: int
    """Its index among the trajectory's conversations."""
    choice: int
    """Index of the choice with which its first call goes on, where that call has several."""
    messages: list[_KeyedMessage]
    tools: tuple[dict[str, Any], ...] = ()
    calls: list[int] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    partial: int = 0
    """Messages at the end from a reply that broke off: the agent may have continued without them."""

    def firm(self) -> int:
        """Return the number of messages without those of a reply that broke off (`partial`)."""
        return len(self.messages) - self.partial

    def drop_partial(self) -> None:
        """Remove the messages of a reply that broke off: the agent continued without them."""
        del self.messages[self.firm() :]
        self.partial = 0

    def end_follow_up(self) -> None:
        """Set `stop` of the last reply to the present end of the conversation: what was added so far followed it."""
        if self.replies and not self.replies[-1].stop:
            self.replies[-1] = self.replies[-1]._replace(stop=len(self.messages))

    def close(self, calls_with_choices: set[int]) -> Conversation:
        """Return what it became. `calls_with_choices`: `seq` of the calls with several replies."""
        calls = f"call{'s' if len(self.calls) > 1 else ''} {_ranges(sorted(self.calls))}"
        if self.calls[0] in calls_with_choices:
            calls += f", choice {self.choice + 1} of call {self.calls[0] + 1}"
        replies = tuple(r for r in self.replies if r.call not in calls_with_choices)
        sampled = tuple(r.place for r in self.replies)
        return Conversation(tuple(m.message for m in self.messages), self.tools, calls, replies, sampled)


def build_conversations(exchanges: Iterable[ExchangeRecorded]) -> tuple[tuple[Conversation, ...], int]:
    """Return the conversations of one trajectory, and the index of the one with its last call.

    Side calls do not train and are left out, unless there is nothing else. Without exchanges the list is empty."""
    unique: dict[tuple[int, int], ExchangeRecorded] = {}
    for exchange in exchanges:
        unique.setdefault((exchange.seq, exchange.choice), exchange)
    ordered = [unique[key] for key in sorted(unique)]
    main = [e for e in ordered if not e.side_call] or ordered
    builder = _ConversationBuilder()
    last, newest = 0, (-1, 0)
    for exchange in main:
        number = builder.add(exchange)
        if (exchange.seq, -exchange.choice) > newest:  # of a call with several choices, the first one counts
            last, newest = number, (exchange.seq, -exchange.choice)
    calls_with_choices = {e.seq for e in main if e.choice}
    return tuple(c.close(calls_with_choices) for c in builder.conversations), last


class _ConversationBuilder:
    """Assigns exchanges to conversations."""

    def __init__(self) -> None:
        self.conversations: list[_OpenConversation] = []
        self._messages: dict[bytes, _KeyedMessage] = {}
        """The messages of requests by their JSON. Requests repeat earlier messages, and each is decoded once."""

    def add(self, exchange: ExchangeRecorded) -> int:
        """Add an exchange to the conversation that it continues, or begin a new one. Return the conversation's
        index."""
        request, tools = self._request(exchange)
        conversation = self._continued_by(request)
        if conversation is None:
            conversation = _OpenConversation(len(self.conversations), exchange.choice, [])
            self.conversations.append(conversation)
        elif conversation.messages != request[: len(conversation.messages)]:  # the request lacks the partial reply
            conversation.drop_partial()
        conversation.messages += request[len(conversation.messages) :]
        conversation.tools = tools or conversation.tools
        conversation.calls.append(exchange.seq)
        conversation.end_follow_up()
        reply = [_KeyedMessage(m, _content_key(m)) for m in _reply_messages(exchange)]
        if reply and exchange.status == "complete" and not exchange.side_call:
            conversation.replies.append(Reply(exchange.seq, len(conversation.messages), role=exchange.role))
        conversation.messages += reply
        conversation.partial = len(reply) if exchange.status != "complete" else 0
        return conversation.number

    def _continued_by(self, request: Sequence[_KeyedMessage]) -> _OpenConversation | None:
        """Return the longest conversation with which a request begins."""
        fitting = [c for c in self.conversations if c.messages[: c.firm()] == request[: c.firm()]]
        return max(fitting, key=_OpenConversation.firm, default=None)

    def _request(self, exchange: ExchangeRecorded) -> tuple[list[_KeyedMessage], tuple[dict[str, Any], ...]]:
        """Return the request's messages and tools. A request repeats the earlier messages, so each one is decoded
        only once."""
        try:
            request = _raw_fields.decode(exchange.request)
        except (msgspec.DecodeError, RecursionError):
            return [], ()
        tools = _decode(request.get("tools"))
        offered = tuple(t for t in tools if isinstance(t, dict)) if isinstance(tools, list) else ()
        if "messages" not in request and "prompt" in request:
            return self._completion(_prompt_text(request, exchange.choice)), offered
        try:
            messages = _raw_list.decode(request.get("messages", b"[]"))
        except (msgspec.DecodeError, RecursionError):
            return [], offered
        return [keyed for m in messages if (keyed := self._keyed(bytes(m))) is not None], offered

    def _keyed(self, raw: bytes) -> _KeyedMessage | None:
        """Return a message of a request with its key; `None` for what is no message, or nested too deeply."""
        if raw not in self._messages:
            message = _decode(raw)
            if not isinstance(message, dict):
                return None
            try:
                self._messages[raw] = _KeyedMessage(message, _content_key(message))
            except RecursionError:
                return None
        return self._messages[raw]

    def _completion(self, prompt: str) -> list[_KeyedMessage]:
        """Return a plain completion's prompt as messages: those of the conversation that it continues, the one with the
        longest text with which the prompt begins, and one with the rest of the prompt."""
        longest, messages = "", list[_KeyedMessage]()
        for conversation in self.conversations:
            firm = conversation.messages[: conversation.firm()]
            text = "".join(text_of(m.message.get("content")) for m in firm)
            if firm and firm[0].message.get("role") == _PROMPT and len(text) > len(longest) and prompt.startswith(text):
                longest, messages = text, firm
        if rest := prompt[len(longest) :]:
            message = {"role": _PROMPT, "content": rest}
            messages.append(_KeyedMessage(message, _content_key(message)))
        return messages


def _ranges(indices: Iterable[int]) -> str:
    """Return ascending indices from 0 as calls counted from 1, in ranges: `1 to 3, 5`. Repetitions are ignored."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and index <= ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ", ".join(str(a + 1) if a == b else f"{a + 1} to {b + 1}" for a, b in ranges)


def _decode(document: bytes | msgspec.Raw | None) -> Any:
    """Return the document's value, or `None` if it is no JSON, as the response of a call that broke off may be."""
    try:
        return msgspec.json.decode(document) if document is not None else None
    except (msgspec.DecodeError, RecursionError):
        return None


def _prompt_text(request: dict[str, msgspec.Raw], choice: int) -> str:
    """Return the prompt of a plain completion's choice. Of several prompts, the first `n` choices belong to the first
    one."""
    prompt, n = _decode(request["prompt"]), _decode(request.get("n"))
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[min(choice // (n if isinstance(n, int) and n > 0 else 1), len(prompt) - 1)]
    tokens = len(prompt) if isinstance(prompt, list) else 0
    return prompt if isinstance(prompt, str) else f"({tokens} token ids)"


def _reply_messages(exchange: ExchangeRecorded) -> list[Message]:
    """Return the reply of an exchange as a list of one message, that of a plain completion too; empty without one."""
    response = _decode(exchange.response)
    choices = response.get("choices") if isinstance(response, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    if isinstance(choice.get("message"), dict):
        return [choice["message"]]
    return [{"role": "assistant", "content": choice["text"]}] if isinstance(choice.get("text"), str) else []


def _content_key(message: Message) -> int:
    """Return a hash of a message's role, name, text and tool calls. Reasoning, ids and empty fields do not count."""
    calls = message.get("tool_calls")
    called = [
        (f.get("name"), _canonical(f.get("arguments")))
        for call in (calls if isinstance(calls, list) else ())
        if isinstance(call, dict) and isinstance(f := call.get("function"), dict)
    ]
    role = message.get("role") or "assistant"
    name = str(message.get("name") or "")
    return hash((str(role), name, text_of(message.get("content")).strip(), repr(called)))


def _canonical(arguments: Any) -> Any:
    """Return the arguments of a tool call in one spelling, whatever the spaces and the order of the keys. Missing ones
    count as an empty object, as clients send them back. Arguments that are no JSON are returned as they are."""
    try:
        decoded = msgspec.json.decode(arguments) if isinstance(arguments, str) and arguments else arguments or {}
        return msgspec.json.encode(decoded, order="sorted")
    except (msgspec.DecodeError, RecursionError):
        return arguments


def text_of(content: Any) -> str:
    """Return a message's content as text. An image is replaced by its name, other parts that are no text by their
    type."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {"text": str(part)} for part in content]
        return "\n".join(map(_part_text, parts))
    return msgspec.json.encode(content).decode()


def _part_text(part: dict[str, Any]) -> str:
    """Return a part of a message's content as text: `(image 5f1c…)` or `(input_audio)` for other media."""
    if part.get("text") is not None:
        return str(part["text"])
    image = image_of(part)
    return f"({part.get('type', 'part')})" if image is None else f"(image {image_name(image)})"
