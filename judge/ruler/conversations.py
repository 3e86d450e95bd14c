"""Everything of a trajectory that trains, as conversations: what the judge reads is what the trainer learns from.

The trainer learns from every complete reply of every call that is no side call. One conversation does not show all of them:
a call with `n > 1` has several replies, sub-agents have conversations of their own, an agent that shortens its history
drops what it said before. So a trajectory is a list of conversations, in the order in which they began. A call continues the
longest conversation with which its request begins, message by message; any other call begins a new one.

An agent may send a reply back without its reasoning, or with other empty fields than it got. Such a reply still counts as
the same message, and the conversation keeps the reply as it was sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pipeline.events import ExchangeRecorded

Message = dict[str, Any]


Place = tuple[int, int]
"""Index of a conversation, and of a message in it."""


@dataclass(frozen=True)
class Conversation:
    """One line of messages, each after all those before it."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    calls: str = ""
    """Which model calls of the trajectory it holds, counted from 1, for the reader: `calls 1 to 3`, `call 2, choice 2`."""
    origins: tuple[Place | None, ...] = ()
    """Where an earlier conversation of the trajectory holds the message already; None for a message that is new here. Empty:
    all are new."""


@dataclass(frozen=True)
class _Read:
    """A message and what tells it from others."""

    message: Message
    key: int


@dataclass
class _Growing:
    number: int
    choice: int
    messages: list[Message] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    origins: list[Place | None] = field(default_factory=list)
    tools: tuple[dict[str, Any], ...] = ()
    calls: list[int] = field(default_factory=list)
    partial: int = 0
    """Messages at the end that came from a reply which broke off: the agent may have gone on without them."""
    remembered: int = 0

    def firm(self) -> int:
        return len(self.messages) - self.partial

    def add(self, messages: Sequence[_Read], origins: Sequence[Place | None] = ()) -> None:
        self.messages += [m.message for m in messages]
        self.keys += [m.key for m in messages]
        self.origins += origins or [None] * len(messages)

    def drop_partial(self) -> None:
        kept = self.firm()
        del self.messages[kept:], self.keys[kept:], self.origins[kept:]
        self.partial = 0


def conversations(exchanges: Iterable[ExchangeRecorded]) -> tuple[tuple[Conversation, ...], int]:
    """The conversations of one trajectory, and the index of the one with its last call.

    Side calls are left out, because they do not train; they are read where there is nothing else. There are no
    conversations where there is no exchange."""
    unique: dict[tuple[int, int], ExchangeRecorded] = {}
    for exchange in exchanges:
        unique.setdefault((exchange.seq, exchange.choice), exchange)
    ordered = [unique[key] for key in sorted(unique)]
    main = [e for e in ordered if not e.side_call] or ordered
    builder = _Builder()
    last, newest = 0, (-1, 0)
    for exchange in main:
        number = builder.add(exchange)
        if (exchange.seq, -exchange.choice) > newest:
            last, newest = number, (exchange.seq, -exchange.choice)
    several = {e.seq for e in main if e.choice}
    return tuple(_done(g, several) for g in builder.growing), last


class _Builder:
    def __init__(self) -> None:
        self.growing: list[_Growing] = []
        self._read: dict[bytes, _Read] = {}
        self._first: dict[int, Place] = {}
        """Where a message with this key was new."""

    def add(self, exchange: ExchangeRecorded) -> int:
        """Put the exchange where it belongs; the index of its conversation."""
        asked, tools = self._asked(exchange)
        keys = [m.key for m in asked]
        conversation = self._continued(keys)
        if conversation is None:
            conversation = _Growing(len(self.growing), exchange.choice)
            conversation.add(asked, self._origins(keys))
            self.growing.append(conversation)
        elif conversation.keys != keys[: len(conversation.keys)]:
            conversation.drop_partial()
        conversation.add(asked[len(conversation.keys) :])
        conversation.tools = tools or conversation.tools
        conversation.calls.append(exchange.seq)
        replies = [_Read(m, _key(m)) for m in _replied(exchange)]
        conversation.add(replies)
        conversation.partial = len(replies) if exchange.status != "complete" else 0
        self._remember(conversation)
        return conversation.number

    def _continued(self, keys: Sequence[int]) -> _Growing | None:
        """The longest conversation that a request begins with."""
        fitting = [g for g in self.growing if g.keys[: g.firm()] == keys[: g.firm()]]
        return max(fitting, key=_Growing.firm, default=None)

    def _origins(self, keys: Sequence[int]) -> list[Place | None]:
        """Where each message of a new conversation was said before."""
        out: list[Place | None] = []
        for key in keys:
            place = self._first.get(key)
            if out and (before := out[-1]) is not None:
                number, after = before[0], before[1] + 1
                earlier = self.growing[number]
                if after < earlier.firm() and earlier.keys[after] == key and earlier.origins[after] is None:
                    place = (number, after)  # the run goes on, though the same was said elsewhere too
            out.append(place)
        return out

    def _remember(self, conversation: _Growing) -> None:
        for index in range(conversation.remembered, conversation.firm()):
            if conversation.origins[index] is None:
                self._first.setdefault(conversation.keys[index], (conversation.number, index))
        conversation.remembered = conversation.firm()

    def _asked(self, exchange: ExchangeRecorded) -> tuple[list[_Read], tuple[dict[str, Any], ...]]:
        """The request's messages and tools. A request repeats all before it, so each message is decoded once only."""
        try:
            request = _raw_fields.decode(exchange.request)
        except msgspec.DecodeError:
            return [], ()
        tools = _decoded(request.get("tools"))
        offered = tuple(t for t in tools if isinstance(t, dict)) if isinstance(tools, list) else ()
        if "messages" not in request and "prompt" in request:
            return self._completion(_prompt(request, exchange.choice)), offered
        try:
            messages = _raw_list.decode(request.get("messages", b"[]"))
        except msgspec.DecodeError:
            return [], offered
        return [r for m in messages if (r := self._message(bytes(m))) is not None], offered

    def _message(self, raw: bytes) -> _Read | None:
        if (known := self._read.get(raw)) is not None:
            return known
        message = _decoded(raw)
        if not isinstance(message, dict):
            return None
        return self._read.setdefault(raw, _Read(message, _key(message)))

    def _completion(self, prompt: str) -> list[_Read]:
        """A plain completion's prompt, told apart into the conversation that it goes on with and what is new."""
        begun = [
            (text, g)
            for g in self.growing
            if g.messages
            and g.messages[0].get("role") == _PROMPT
            and prompt.startswith(text := "".join(text_of(m.get("content")) for m in g.messages[: g.firm()]))
        ]
        text, before = max(begun, key=lambda b: len(b[0]), default=("", None))
        known = before.firm() if before is not None else 0
        out = (
            [_Read(m, k) for m, k in zip(before.messages[:known], before.keys, strict=False)]
            if before
            else []
        )
        if rest := prompt[len(text) :]:
            new = {"role": _PROMPT, "content": rest}
            out.append(_Read(new, _key(new)))
        return out


def _done(growing: _Growing, several: set[int]) -> Conversation:
    said = f"call{'s' if len(growing.calls) > 1 else ''} {_ranges(sorted(growing.calls))}"
    if growing.calls[0] in several:
        said += f", choice {growing.choice + 1} of call {growing.calls[0] + 1}"
    return Conversation(tuple(growing.messages), growing.tools, said, tuple(growing.origins))


def _ranges(numbers: Sequence[int]) -> str:
    """Calls counted from 1: `1 to 3, 5`."""
    out: list[list[int]] = []
    for number in numbers:
        if out and number == out[-1][1] + 1:
            out[-1][1] = number
        elif not out or number != out[-1][1]:
            out.append([number, number])
    return ", ".join(str(a + 1) if a == b else f"{a + 1} to {b + 1}" for a, b in out)


# -- reading an exchange -------------------------------------------------------------------------------------------


_PROMPT = "prompt"
"""Role under which a plain completion's prompt is shown."""
_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_raw_list = msgspec.json.Decoder(list[msgspec.Raw])


def _decoded(document: bytes | msgspec.Raw | None) -> Any:
    """The document's value; None where it is none, as the reply of a call that broke off may be."""
    try:
        return msgspec.json.decode(document) if document is not None else None
    except msgspec.DecodeError:
        return None


def _prompt(request: dict[str, msgspec.Raw], choice: int) -> str:
    """The text that a plain completion was asked to go on with; its choices are those of its first prompt, then the next."""
    prompt, n = _decoded(request["prompt"]), _decoded(request.get("n"))
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[min(choice // (n if isinstance(n, int) and n > 0 else 1), len(prompt) - 1)]
    return (
        prompt if isinstance(prompt, str) else f"({len(prompt) if isinstance(prompt, list) else 0} token ids)"
    )


def _replied(exchange: ExchangeRecorded) -> list[Message]:
    response = _decoded(exchange.response)
    choices = response.get("choices") if isinstance(response, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    if isinstance(choice.get("message"), dict):
        return [choice["message"]]
    return [{"role": "assistant", "content": choice["text"]}] if isinstance(choice.get("text"), str) else []


def _key(message: Message) -> int:
    """Equal for messages that say the same: reasoning, ids and empty fields aside."""
    calls = message.get("tool_calls")
    said = [
        (f.get("name"), _canonical(f.get("arguments")))
        for call in (calls if isinstance(calls, list) else ())
        if isinstance(call, dict) and isinstance(f := call.get("function"), dict)
    ]
    role = message.get("role") or "assistant"
    return hash((str(role), message.get("name") or "", text_of(message.get("content")).strip(), repr(said)))


def _canonical(arguments: Any) -> Any:
    """Arguments of a tool call with their spaces and the order of their keys told apart from what they say."""
    if not isinstance(arguments, str):
        return msgspec.json.encode(arguments, order="sorted")
    try:
        return msgspec.json.encode(msgspec.json.decode(arguments), order="sorted")
    except (msgspec.DecodeError, RecursionError):
        return arguments


def text_of(content: Any) -> str:
    """A message's content as text; parts that are no text are named, not shown."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            str(part["text"])
            if isinstance(part, dict) and "text" in part
            else f"({part.get('type', 'part') if isinstance(part, dict) else 'part'})"
            for part in content
        )
    return msgspec.json.encode(content).decode()
