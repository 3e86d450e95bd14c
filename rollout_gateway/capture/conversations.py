"""What the messages of a call tell about its run: what was said before, and what of an earlier answer they quote.

Clients change what they send: they cut old messages off, replace them by a summary, hand over to an agent with another
system prompt, or start agents of their own. `Quote` keeps of an answer what such a call would repeat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import msgspec

Canonical = tuple[str, str, str]
"""Role, text and tool calls: what clients keep of a message when they send it back. Arguments of tool calls are
compared as JSON, since clients parse them and write them again in their own way."""

_INSTRUCTIONS = ("system", "developer")
_QUOTE_CHARS = 40
"""Shorter texts may be the same in two runs by chance."""
_COMPARED = 64
"""Messages of a history that are compared, the newest ones."""
_LOOKED_UP = 32
"""Lines of a call, the longest first, that are looked up as quotations."""
_NOT_QUOTED = "analysis"
"""Tag around the part of a summary that Claude Code leaves out when it goes on."""
_REMINDERS = "system-reminder"
"""Tag around what Claude Code adds to the user's texts."""


@dataclass(frozen=True)
class CallMessages:
    """The messages of a call, or of a call and its answer."""

    owner: str
    model: str
    messages: tuple[Canonical, ...]
    tools: tuple[str, ...]
    """Names of its tools, sorted."""
    call_ids: tuple[str, ...]
    """Ids of the tool calls in its last message of the assistant."""
    texts: frozenset[str]
    """Texts of the user, each part of a message by itself."""

    @classmethod
    def read(cls, owner: str, model: str, messages: Any, tools: Any) -> CallMessages:
        """`messages` and `tools` are those of a chat completion, decoded."""
        valid = [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
        users = [m.get("content") for m in valid if m.get("role") == "user"]
        names = {str(_function(t).get("name")) for t in tools} if isinstance(tools, list) else set()
        said = [m for m in valid if m.get("role") == "assistant" and _canonical(m) != _EMPTY]
        return cls(
            owner,
            model,
            canonicals(valid),
            tuple(sorted(names)),
            _call_ids(said[-1]) if said else (),
            frozenset(_without(_REMINDERS, text).strip() for content in users for text in _texts(content)),
        )

    def with_answer(self, message: dict[str, Any]) -> CallMessages:
        """The conversation with an answer at its end."""
        said = canonicals([message])
        ids = _call_ids(message) if said else self.call_ids
        return replace(self, messages=(*self.messages, *said), call_ids=ids)

    @cached_property
    def histories(self) -> list[str]:
        """A hash of the first message, of the first two, and so on."""
        digest = hashlib.sha256(f"{self.owner}\0{self.model}".encode())
        out = []
        for message in self.messages:
            digest.update(msgspec.msgpack.encode(message))
            out.append(digest.hexdigest()[:32])
        return out

    def possible_histories(self) -> list[str]:
        """Histories that a call with these messages may continue, the longest first: they end with an answer. An empty
        answer is left out of a history, so all but the last message are one, too."""
        histories = self.histories[:-1]
        return [
            history
            for index, history in reversed(list(enumerate(histories)))
            if self.messages[index][0] == "assistant" or index == len(histories) - 1
        ]

    @cached_property
    def spoken(self) -> list[Canonical]:
        """The messages without instructions, up to the last one of the assistant."""
        spoken = [m for m in self.messages if m[0] not in _INSTRUCTIONS]
        while spoken and spoken[-1][0] != "assistant":
            spoken.pop()
        return spoken

    @property
    def program(self) -> str:
        """A hash of what the client's program is told by: the names of its tools, else its system prompt. A system
        prompt beside tools often has the time in it."""
        return self.digest("program", self.tools or [m for m in self.messages if m[0] in _INSTRUCTIONS])

    @property
    def group(self) -> str:
        """A hash that is the same for runs that begin alike: with the same tools and messages, whatever their
        instructions."""
        return self.digest(self.tools, [m for m in self.messages if m[0] not in _INSTRUCTIONS])

    @cached_property
    def lines(self) -> frozenset[str]:
        """The long lines of the user."""
        return frozenset(line for text in self.texts for line in _long_lines(text))

    def fingerprints(self) -> list[str]:
        """Fingerprints of the quotes that may be in these messages."""
        history = [self.digest("history", self.spoken[-2:])] if self.spoken else []
        longest = sorted(self.lines, key=len, reverse=True)[:_LOOKED_UP]
        return [*history, *(self.digest("line", line) for line in longest)]

    def digest(self, *what: Any) -> str:
        data = msgspec.msgpack.encode((self.owner, self.model, what))
        return hashlib.sha256(data).hexdigest()[:20]


Match = Literal["certain", "likely", "branch", "copy", "none"]


class Quote(msgspec.Struct, array_like=True):
    """What a later call may quote of a conversation that ends with an answer."""

    kind: Literal["history", "summary", "task"]
    fingerprint: str
    said: list[str]
    """`history`: a hash of each message that is no instruction, the newest ones. `summary`: the long lines of the
    answer, hashed. `task`: the text that the answer hands to a tool, hashed."""
    call_ids: tuple[str, ...]
    programs: list[str]
    """Hashes of the programs that made the run's calls."""

    def match(self, call: CallMessages, *, newest: bool) -> Match:
        """Whether a call with this quote's fingerprint goes on with the conversation, `certain`ly or `likely`, is a
        `branch` of its run by an agent that the answer starts, or may be a `copy` of one of the two. `newest`: the run
        has not gone on since. If it has, the ids of its tool calls tell that the call goes on from before that."""
        match = self._match(call)
        return match if newest or match in ("certain", "branch") else "none"

    def _match(self, call: CallMessages) -> Match:
        match self.kind:
            case "history":
                return self._match_history(call)
            case "summary":
                if not {call.digest("line", line) for line in call.lines}.issuperset(self.said):
                    return "none"
                return "likely" if call.program in self.programs else "none"
            case "task":
                if self.said[0] not in {call.digest("text", text) for text in call.texts}:
                    return "none"
                return "copy" if call.program in self.programs else "branch"

    def _match_history(self, call: CallMessages) -> Match:
        spoken = _message_hashes(call)
        if spoken == self.said:  # only the instructions differ
            return "certain" if call.call_ids and call.call_ids == self.call_ids else "likely"
        answers, before = ([s for s in said if s[0] == "a"] for said in (spoken, self.said))
        if before[-len(answers) :] != answers:
            return "none"
        if self.call_ids:
            return "certain" if call.call_ids == self.call_ids else "copy"
        return "likely" if sum(len(text) for _, text, _ in call.spoken[-2:]) >= _QUOTE_CHARS else "copy"


def quotes(answered: CallMessages, programs: list[str]) -> list[Quote]:
    """What later calls may quote of a conversation whose last message is an answer."""
    if not answered.spoken or answered.messages[-1][0] != "assistant":
        return []
    _, text, calls = answered.messages[-1]
    before = "\n".join(f"{text}\n{calls}" for _, text, calls in answered.messages[:-1])

    def quote(kind: Literal["history", "summary", "task"], fingerprint: str, said: list[str]) -> Quote:
        return Quote(kind, fingerprint, said, answered.call_ids, programs)

    out = [quote("history", answered.fingerprints()[0], _message_hashes(answered))]
    # A text that the run was given may be in the prompt of any other run of its task.
    new = [line for line in _long_lines(_without(_NOT_QUOTED, text)) if line not in before]
    if new and not calls:
        said = [answered.digest("line", line) for line in new]
        out.append(quote("summary", answered.digest("line", max(new, key=len)), said))
    for task in {t.strip() for _, arguments in msgspec.json.decode(calls or "[]") for t in _strings(arguments)}:
        if (lines := _long_lines(task)) and task not in before:
            fingerprint = answered.digest("line", max(lines, key=len))
            out.append(quote("task", fingerprint, [answered.digest("text", task)]))
    return out


def _message_hashes(conversation: CallMessages) -> list[str]:
    """Return a hash of each of the newest `_COMPARED` messages up to the last answer, without instructions, the oldest
    first. `a` before the hash marks an answer, `-` any other message. Messages of other owners or models hash
    differently."""
    newest = conversation.spoken[-_COMPARED:]
    return [("a" if m[0] == "assistant" else "-") + conversation.digest(m)[:10] for m in newest]


def _long_lines(text: str) -> list[str]:
    return [stripped for line in text.splitlines() if len(stripped := line.strip()) >= _QUOTE_CHARS]


def _strings(arguments: Any) -> list[str]:
    """The strings among the arguments of a tool call."""
    values = arguments.values() if isinstance(arguments, dict) else ()
    return [value for value in values if isinstance(value, str)]


def _texts(content: Any) -> list[str]:
    parts = content if isinstance(content, list) else [{"text": content}]
    return [str(part.get("text") or "") for part in parts if isinstance(part, dict)]


def _call_ids(message: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(call.get("id")) for call in _calls(message))


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _function(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function if isinstance(function, dict) else {}


_EMPTY = ("assistant", "", "")


def canonicals(messages: Sequence[Any]) -> tuple[Canonical, ...]:
    """The messages without empty ones of the assistant, which some clients leave out of the history they send."""
    said = (_canonical(m) for m in messages if isinstance(m, dict))
    return tuple(m for m in said if m != _EMPTY)


def _canonical(message: dict[str, Any]) -> Canonical:
    calls = [(f.get("name"), _arguments(f.get("arguments"))) for call in _calls(message) if (f := _function(call))]
    return (
        str(message.get("role")),
        "".join(_texts(message.get("content"))).strip(),  # some clients leave out white space at the ends
        msgspec.json.encode(calls, order="sorted").decode() if calls else "",
    )


def _arguments(sent: Any) -> Any:
    """The arguments of a tool call, parsed if they are JSON. Clients send empty ones as `""` or `{}`."""
    if not isinstance(sent, str):
        return _numbers(sent) or {}
    try:
        return _numbers(msgspec.json.decode(sent)) or {} if sent.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return sent


def _numbers(value: Any) -> Any:
    """`value` with 1.0 replaced by 1, as JavaScript writes it."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _without(tag: str, text: str) -> str:
    """Return `text` without what stands between a tag and its end, in time in proportion to its length, which a regular
    expression would not take."""
    begin, end = f"<{tag}>", f"</{tag}>"
    kept, at = list[str](), 0
    while (tagged := text.find(begin, at)) >= 0 and (ends := text.find(end, tagged)) >= 0:
        kept.append(text[at:tagged])
        at = ends + len(end)
    return "".join((*kept, text[at:]))
