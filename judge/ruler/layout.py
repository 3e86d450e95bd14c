"""What stands where in a judge's prompt: what the trajectories of a call have in common once, the rest with each of them.

In common are the tools and messages with which all of them begin, the beginning of the first message that differs, and any
long message that occurs more than once, which is then referred to by an id drawn for the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from judge.ruler.conversations import Conversation, Message
from judge.ruler.transcripts import Transcript, render_one, render_tools

_LONG = 1_000
"""Characters from which something common is worth a reference."""
_RUN = 200
"""Characters from which messages of an earlier conversation are referred to instead of shown again."""


@dataclass(frozen=True)
class Part:
    """One conversation of a trajectory, as text."""

    label: str
    """Which of several it is; empty where there is only one."""
    text: str


@dataclass(frozen=True)
class Layout:
    """The texts of one call, none of them cut."""

    context: str
    members: tuple[tuple[Part, ...], ...]
    """By trajectory, in the order given."""


@dataclass(frozen=True)
class _Piece:
    text: str
    movable: bool = False
    """A message that may be shown in the context instead."""
    lead: str = ""
    """What then stands in its place before the reference."""


def common_prefix(conversations: Sequence[Sequence[Message]]) -> int:
    """How many leading messages all of them share."""
    shortest = min((len(c) for c in conversations), default=0)
    for index in range(shortest):
        first = conversations[0][index]
        if any(c[index] != first for c in conversations[1:]):
            return index
    return shortest


def lay_out(transcripts: Sequence[Transcript], new_id: Callable[[], str]) -> Layout:
    """`new_id` gives ids that no text of the trajectories can know."""
    members = [t.parts() for t in transcripts]
    firsts = [m[0].messages for m in members]
    # Each keeps its last message as its own, also where one is all of what another begins with.
    shared = max(min(common_prefix(firsts), *(len(m) - 1 for m in firsts)), 0)
    if len(members) < 2:
        shared = 0
    tools = members[0][0].tools if all(m[0].tools == members[0][0].tools for m in members) else ()
    context = [render_tools(tools)] if tools else []
    context += [render_one(m) for m in firsts[0][:shared]]
    begun = _begun(firsts, shared) if len(members) > 1 else 0
    if begun:
        message = firsts[0][shared]
        context.append(
            render_one({"role": message.get("role"), "name": message.get("name"), "content": message["content"][:begun]})
            + "\n(this message goes on in each attempt)"
        )  # fmt: skip
    told = [_member(parts, tools, shared, begun) for parts in members]
    moved = _moved(told, new_id)
    context += [f"[text {name}] {text}" for text, name in moved.items()]
    texts = [
        tuple(
            Part(
                f"conversation {number} of {len(parts)}: {conversation.calls}" if len(parts) > 1 else "",
                "\n".join(_shown(p, moved) for p in pieces),
            )
            for number, (conversation, pieces) in enumerate(zip(parts, member, strict=True), 1)
        )
        for parts, member in zip(members, told, strict=True)
    ]
    return Layout("\n".join(context), tuple(texts))


def _begun(conversations: Sequence[Sequence[Message]], index: int) -> int:
    """How many characters of the message at `index` all conversations share, if that is worth showing once."""
    if any(len(c) <= index for c in conversations):
        return 0
    messages = [c[index] for c in conversations]
    contents = [m.get("content") for m in messages]
    if (
        not all(isinstance(c, str) for c in contents)
        or len({(m.get("role"), m.get("name")) for m in messages}) > 1
    ):
        return 0
    low, high = min(map(str, contents)), max(map(str, contents))
    length = next(
        (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high))
    )
    common = low[:length]
    end = max(common.rfind("\n"), common.rfind(" ")) + 1
    return end if end >= _LONG else 0


def _member(
    parts: Sequence[Conversation], tools: tuple[dict[str, Any], ...], shared: int, begun: int
) -> list[list[_Piece]]:
    out = []
    offered = tools
    for number, conversation in enumerate(parts):
        pieces = []
        if conversation.tools != offered:
            pieces.append(_Piece(render_tools(conversation.tools) or "[tools] none"))
            offered = conversation.tools
        start = shared if number == 0 else 0
        if number == 0 and shared and len(parts) > 1:
            pieces.append(_Piece(f"(messages 1 to {shared} are those of the context)"))
        pieces += _messages(conversation, start, begun if number == 0 else 0)
        out.append(pieces)
    return out


def _messages(conversation: Conversation, start: int, begun: int) -> list[_Piece]:
    messages, origins = conversation.messages, conversation.origins or (None,) * len(conversation.messages)
    out: list[_Piece] = []
    index = start
    while index < len(messages):
        origin, stop = origins[index], index + 1
        if origin is not None:
            while stop < len(messages) and origins[stop] == (origin[0], origin[1] + stop - index):
                stop += 1
            texts = [render_one(m) for m in messages[index:stop]]
            if sum(map(len, texts)) >= _RUN:
                out.append(
                    _Piece(f"({_span(origin[1], stop - index)} of conversation {origin[0] + 1} again)")
                )
            else:
                out += [_Piece(t) for t in texts]
            index = stop
            continue
        message = messages[index]
        if begun and index == start:
            rest = render_one({**message, "content": message["content"][begun:]})
            out.append(_Piece(rest.replace("]", ", continued]", 1)))
        else:
            lead = f"[{message.get('role', '?')}]"
            out.append(_Piece(render_one(message), index < len(messages) - 1, lead))
        index += 1
    return out


def _span(first: int, count: int) -> str:
    return f"messages {first + 1} to {first + count}" if count > 1 else f"message {first + 1}"


def _moved(told: Sequence[Sequence[Sequence[_Piece]]], new_id: Callable[[], str]) -> dict[str, str]:
    """Id of each long text that stands in several places."""
    counted = Counter(
        p.text for member in told for pieces in member for p in pieces if p.movable and len(p.text) >= _LONG
    )
    return {text: new_id() for text, count in counted.items() if count > 1}


def _shown(piece: _Piece, moved: dict[str, str]) -> str:
    if piece.movable and piece.text in moved:
        return f"{piece.lead} (text {moved[piece.text]} of the context)"
    return piece.text
