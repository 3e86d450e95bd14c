"""What the messages of a call tell about its run: what was said before, and what of an earlier answer they quote.

`detection` compares calls by `CallMessages`. Clients change what they send: they cut old messages off, replace them by
a summary, hand over to an agent with another system prompt, or start agents of their own. A `Quote` keeps of an answer
what such a call would repeat. It is stored on the log under a fingerprint, a hash of a part of the quote; a later call
looks the fingerprints of its own texts up there.

A "history" is a hash of all messages up to some message. "Instructions" are system and developer messages. A "program"
is what the client runs, told by its tools or its system prompt.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec

_INSTRUCTIONS = ("system", "developer")
_MIN_QUOTE_CHARS = 40
"""Shorter texts may be the same in two runs by chance."""
_MAX_COMPARED = 64
"""Messages of a history that are compared, the newest ones."""
_HISTORIES = 64
"""Histories of a call that are looked up, the longest ones: clients change what is near a conversation's end."""
_MAX_LOOKED_UP = 32
"""Lines of a call, the longest first, that are looked up as quotations."""
_ANALYSIS_TAG = "analysis"
"""Tag around the part of a summary that Claude Code leaves out when it goes on."""
_REMINDER_TAG = "system-reminder"
"""Tag around what Claude Code adds to the user's texts."""


class Message(NamedTuple):
    """What clients keep of a message when they send it back."""

    role: str
    text: str
    calls: str
    """Names and arguments of its tool calls, as JSON. Arguments are decoded for it, since clients parse them and write
    them again in their own way."""


@dataclass(frozen=True)
class CallMessages:
    """The messages of a call, or of a call and its answer."""

    owner: str
    model: str
    messages: tuple[Message, ...]
    tools: tuple[str, ...]
    """Names of its tools, sorted."""
    tool_call_ids: tuple[str, ...]
    """Ids of the tool calls in its last message of the assistant."""
    user_texts: frozenset[str]
    """Texts of the user, each part of a message by itself."""

    @classmethod
    def read(cls, owner: str, model: str, messages: Any, tools: Any) -> CallMessages:
        """Read the messages of a chat completion. `messages` and `tools`: its decoded fields, which may have any form,
        as no server has checked them; what has another form is left out."""
        valid = [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
        users = [m.get("content") for m in valid if m.get("role") == "user"]
        names = {str(_function(t).get("name")) for t in tools} if isinstance(tools, list) else set()
        answers = [m for m in valid if m.get("role") == "assistant" and _message(m) != _EMPTY_ANSWER]
        return cls(
            owner,
            model,
            _messages(valid),
            tuple(sorted(names)),
            _tool_call_ids(answers[-1]) if answers else (),
            frozenset(_without_tagged(_REMINDER_TAG, text).strip() for content in users for text in _texts(content)),
        )

    def with_answer(self, message: dict[str, Any]) -> CallMessages:
        """Return the conversation with an answer at its end. `message`: the answer's, of any form."""
        answer = _messages([message])
        ids = _tool_call_ids(message) if answer else self.tool_call_ids
        return replace(self, messages=(*self.messages, *answer), tool_call_ids=ids)

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
        """Return the histories that a call with these messages may continue, the longest first: those that end with an
        answer, and that of all messages but the last, since an empty answer is left out of `messages`. They are
        `_HISTORIES` at most, as the log is asked about each."""
        histories = self.histories[:-1]
        possible = (
            history
            for index, history in reversed(list(enumerate(histories)))
            if self.messages[index].role == "assistant" or index == len(histories) - 1
        )
        return list(itertools.islice(possible, _HISTORIES))

    @cached_property
    def up_to_answer(self) -> list[Message]:
        """The messages without instructions, up to the last answer. Empty if there is none."""
        messages = self._without_instructions()
        while messages and messages[-1].role != "assistant":
            messages.pop()
        return messages

    def _without_instructions(self) -> list[Message]:
        return [m for m in self.messages if m.role not in _INSTRUCTIONS]

    @property
    def program(self) -> str:
        """A hash of what tells the client's program: the names of its tools, else its system prompt. A system prompt
        beside tools often has the time in it."""
        return self.digest("program", self.tools or [m for m in self.messages if m.role in _INSTRUCTIONS])

    @property
    def group(self) -> str:
        """A hash that is the same for runs that begin alike: with the same tools and messages, whatever their
        instructions."""
        return self.digest(self.tools, self._without_instructions())

    @cached_property
    def user_lines(self) -> frozenset[str]:
        """The lines of the user's texts that are long enough to be told from others (`_long_lines`)."""
        return frozenset(line for text in self.user_texts for line in _long_lines(text))

    def fingerprints(self) -> list[str]:
        """Return the fingerprints by which quotes in these messages are looked up. If there is an answer, the first one
        is that of a `history` quote."""
        history = [self.digest("history", self.up_to_answer[-2:])] if self.up_to_answer else []
        longest = sorted(self.user_lines, key=len, reverse=True)[:_MAX_LOOKED_UP]
        return [*history, *(self.digest("line", line) for line in longest)]

    def digest(self, *parts: Any) -> str:
        """Return a hash of `parts`, anything in the messages. It differs for other owners and models."""
        data = msgspec.msgpack.encode((self.owner, self.model, parts))
        return hashlib.sha256(data).hexdigest()[:20]


Match = Literal["certain", "likely", "branch", "copy", "none"]
"""What a call is to a run of which it has a quote. `certain`, `likely`: it goes on with the run. `branch`: it is made
by an agent that the run's agent started. `copy`: it may be one of these, or belong to another run that says the same.
`none`: it only looked like a quote."""


class Quote(msgspec.Struct, array_like=True):
    """What a later call may quote of a conversation that ends with an answer."""

    kind: Literal["history", "summary", "task"]
    fingerprint: str
    quoted: list[str]
    """`history`: a hash of each message that is no instruction, the newest ones. `summary`: the long lines of the
    answer, hashed. `task`: the text that the answer hands to a tool, hashed."""
    tool_call_ids: tuple[str, ...]
    """Of the answer."""
    programs: list[str]
    """Hashes of the programs that made the run's calls."""

    def match(self, call: CallMessages, *, newest: bool) -> Match:
        """Return what a call with this quote's fingerprint is to the run. `newest`: the run has had no call since the
        quote. If it has, the call steps back to an earlier answer, which only ids of tool calls make certain; and a
        branch may begin at any time."""
        match = self._match(call)
        return match if newest or match in ("certain", "branch") else "none"

    def _match(self, call: CallMessages) -> Match:
        """Return what a call is to the run, as if the run had had no call since the quote."""
        match self.kind:
            case "history":
                return self._match_history(call)
            case "summary":
                if not {call.digest("line", line) for line in call.user_lines}.issuperset(self.quoted):
                    return "none"
                return "likely" if call.program in self.programs else "none"
            case "task":
                if self.quoted[0] not in {call.digest("text", text) for text in call.user_texts}:
                    return "none"
                return "copy" if call.program in self.programs else "branch"

    def _match_history(self, call: CallMessages) -> Match:
        """Return what a call is to the run, by a quote of kind `history`. The fingerprint says that the last two
        messages are the same. The ones before are compared: all of them, or, where the client cut or cleared some, the
        answers that it still sends. Example: of `user, answer 1, user, answer 2` a client that trims its history sends
        `user, answer 2` again: that answer is the end of both, so the run may go on."""
        sent = _message_hashes(call)
        # No two runs share ids of tool calls.
        same_ids = bool(call.tool_call_ids) and call.tool_call_ids == self.tool_call_ids
        if sent == self.quoted:  # only the instructions differ
            return "certain" if same_ids else "likely"
        answers_sent, answers_quoted = ([h for h in hashes if h[0] == "a"] for hashes in (sent, self.quoted))
        if answers_quoted[-len(answers_sent) :] != answers_sent:
            return "none"
        if self.tool_call_ids:
            return "certain" if same_ids else "copy"
        return "likely" if sum(len(m.text) for m in call.up_to_answer[-2:]) >= _MIN_QUOTE_CHARS else "copy"


def quotes(conversation: CallMessages, programs: list[str]) -> list[Quote]:
    """Return what later calls may quote of a conversation whose last message is an answer; nothing if it is not.
    `programs`: as in `Quote`."""
    if not conversation.up_to_answer or conversation.messages[-1].role != "assistant":
        return []
    *earlier, answer = conversation.messages
    before = "\n".join(f"{m.text}\n{m.calls}" for m in earlier)

    def quote(kind: Literal["history", "summary", "task"], fingerprint: str, quoted: list[str]) -> Quote:
        return Quote(kind, fingerprint, quoted, conversation.tool_call_ids, programs)

    out = [quote("history", conversation.fingerprints()[0], _message_hashes(conversation))]
    # A text that the run was given may be in the prompt of any other run of its task.
    new = [line for line in _long_lines(_without_tagged(_ANALYSIS_TAG, answer.text)) if line not in before]
    if new and not answer.calls:
        longest = conversation.digest("line", max(new, key=len))
        out.append(quote("summary", longest, [conversation.digest("line", line) for line in new]))
    for task in {t.strip() for _, arguments in msgspec.json.decode(answer.calls or "[]") for t in _strings(arguments)}:
        if (lines := _long_lines(task)) and task not in before:
            longest = conversation.digest("line", max(lines, key=len))
            out.append(quote("task", longest, [conversation.digest("text", task)]))
    return out


def _message_hashes(conversation: CallMessages) -> list[str]:
    """Return a hash of each of the newest `_MAX_COMPARED` messages up to the last answer, without instructions, the
    oldest first. `a` before the hash marks an answer, `-` any other message."""
    newest = conversation.up_to_answer[-_MAX_COMPARED:]
    return [("a" if m.role == "assistant" else "-") + conversation.digest(m)[:10] for m in newest]


def _long_lines(text: str) -> list[str]:
    """The lines that are long enough to be known again as a quotation."""
    return [stripped for line in text.splitlines() if len(stripped := line.strip()) >= _MIN_QUOTE_CHARS]


# -- messages as clients send them, of any form ----------------------------------------------------------------------


def _strings(arguments: Any) -> list[str]:
    """The strings among the arguments of a tool call."""
    values = arguments.values() if isinstance(arguments, dict) else ()
    return [value for value in values if isinstance(value, str)]


def _texts(content: Any) -> list[str]:
    """The texts in a message's content, which is one or a list of parts."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return [str(part.get("text") or "") for part in parts if isinstance(part, dict)]


def _tool_call_ids(message: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(call.get("id")) for call in _tool_calls(message))


def _tool_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls of a message; entries that are no objects are left out."""
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _function(tool: Any) -> dict[str, Any]:
    """The `function` of a tool or of a tool call; empty if it has none."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return function if isinstance(function, dict) else {}


_EMPTY_ANSWER = Message("assistant", "", "")


def _messages(sent: Iterable[Any]) -> tuple[Message, ...]:
    """The messages without empty answers, which some clients leave out of the history they send."""
    messages = (_message(m) for m in sent if isinstance(m, dict))
    return tuple(message for message in messages if message != _EMPTY_ANSWER)


def _message(sent: dict[str, Any]) -> Message:
    """Return what is compared of a message that a client sent."""
    functions = [function for call in _tool_calls(sent) if (function := _function(call))]
    calls = [(function.get("name"), _arguments(function.get("arguments"))) for function in functions]
    return Message(
        str(sent.get("role")),
        "".join(_texts(sent.get("content"))).strip(),  # some clients leave out white space at the ends
        msgspec.json.encode(calls, order="sorted").decode() if calls else "",
    )


def _arguments(sent: Any) -> Any:
    """The arguments of a tool call, parsed if they are JSON. Clients send empty ones as `""` or `{}`."""
    if not isinstance(sent, str):
        return _as_javascript(sent) or {}
    try:
        return _as_javascript(msgspec.json.decode(sent.strip() or "{}")) or {}
    except (msgspec.DecodeError, RecursionError):
        return sent


def _as_javascript(value: Any) -> Any:
    """`value` with 1.0 replaced by 1, as JavaScript writes it."""
    if isinstance(value, dict):
        return {key: _as_javascript(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_javascript(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _without_tagged(tag: str, text: str) -> str:
    """Return `text` without each `<tag>`, its `</tag>` and what stands between them. Takes linear time, which a regular
    expression would not."""
    begin, end = f"<{tag}>", f"</{tag}>"
    pieces, at = list[str](), 0
    while (tag_at := text.find(begin, at)) >= 0 and (end_at := text.find(end, tag_at)) >= 0:
        pieces.append(text[at:tag_at])
        at = end_at + len(end)
    return "".join((*pieces, text[at:]))
