"""The layout of a judge's prompt: text common to the trajectories once, the rest with each trajectory.

In common are the tools and messages with which all of them begin, the beginning of the first message that differs,
and any long message of several trajectories. A message that occurs more than once is replaced by a reference, with an
id drawn for the call: to the common text, or to where the same trajectory has it first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from judge.ruler.transcripts import Transcript, render_message, render_tools
from pipeline.chat.conversations import Conversation, Message

_MIN_SHARED = 1_000
"""Characters from which text of several trajectories is shown once."""
_MIN_REPEATED = 200
"""Characters from which a message is shown once in a trajectory."""

Tools = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class ConversationText:
    """One conversation of a trajectory as text."""

    label: str
    """Which of several conversations it is; empty if there is only one."""
    text: str


@dataclass(frozen=True)
class PromptLayout:
    """The texts of one call, uncut."""

    context: str
    """Text that all trajectories have in common."""
    members: tuple[tuple[ConversationText, ...], ...]
    """The conversations of each trajectory, in the order given."""


@dataclass(frozen=True)
class _Segment:
    text: str
    role: str = ""
    """Empty if the text is no message."""
    last: bool = False
    """The last message of a conversation, which is always shown in its place."""


def count_shared(conversations: Sequence[Sequence[Message]]) -> int:
    """Return how many leading messages all conversations share."""
    shared = 0
    for messages in zip(*conversations, strict=False):
        if any(m != messages[0] for m in messages[1:]):
            break
        shared += 1
    return shared


def build_layout(transcripts: Sequence[Transcript], new_id: Callable[[], str]) -> PromptLayout:
    """Lay out the transcripts. `new_id` returns ids that no text of the trajectories can contain."""
    members = [t.conversations for t in transcripts]
    firsts = [m[0].messages for m in members]
    shared = cut = 0
    if len(members) > 1:
        # Each trajectory keeps its last message, even if another one begins with all of its messages.
        shared = max(min(count_shared(firsts), *(len(m) - 1 for m in firsts)), 0)
        cut = _shared_characters(firsts, shared)
    tools = members[0][0].tools if all(m[0].tools == members[0][0].tools for m in members) else ()
    context = [render_tools(tools)] if tools else []
    context += [render_message(m) for m in firsts[0][:shared]]
    if cut:
        beginning = {**firsts[0][shared], "content": firsts[0][shared]["content"][:cut]}
        head = {key: beginning.get(key) for key in ("role", "name", "content")}
        context.append(render_message(head) + "\n(this message goes on in each attempt)")
    segments = [_segments_of(conversations, tools, shared, cut) for conversations in members]
    references = _references(segments, new_id)
    context += [f"[text {name}] {text}" for text, name in references.items()]
    texts = []
    for conversations, member in zip(members, segments, strict=True):
        several = len(conversations) if len(conversations) > 1 else 0
        labels = [
            f"conversation {number} of {several}: {conversation.calls}" if several else ""
            for number, conversation in enumerate(conversations, 1)
        ]
        texts.append(tuple(map(ConversationText, labels, _texts(member, references, new_id))))
    return PromptLayout("\n".join(context), tuple(texts))


def _shared_characters(conversations: Sequence[Sequence[Message]], index: int) -> int:
    """Return how many characters the messages at `index` share, up to a space or line break; 0 if too few to be worth
    it."""
    if any(len(c) <= index for c in conversations):
        return 0
    messages = [c[index] for c in conversations]
    contents = [content for m in messages if isinstance(content := m.get("content"), str)]
    if len(contents) < len(messages) or len({(m.get("role"), m.get("name")) for m in messages}) > 1:
        return 0
    common = commonprefix(contents)  # noqa: RUF071 - characters are what is compared here
    end = max(common.rfind("\n"), common.rfind(" ")) + 1
    return end if end >= _MIN_SHARED else 0


def _segments_of(conversations: Sequence[Conversation], tools: Tools, shared: int, cut: int) -> list[list[_Segment]]:
    """Return the texts of each conversation. The first one leaves out `shared` messages and `cut` characters of the
    next."""
    out = []
    for number, conversation in enumerate(conversations):
        segments = []
        if conversation.tools != tools:
            segments.append(_Segment(render_tools(conversation.tools) or "[tools] none"))
            tools = conversation.tools
        if number == 0 and shared and len(conversations) > 1:
            segments.append(_Segment(f"(messages 1 to {shared} are those of the context)"))
        segments += _messages(conversation, shared, cut) if number == 0 else _messages(conversation, 0, 0)
        out.append(segments)
    return out


def _messages(conversation: Conversation, start: int, cut: int) -> list[_Segment]:
    segments: list[_Segment] = []
    last = len(conversation.messages) - 1
    for index, message in enumerate(conversation.messages[start:], start):
        if cut and index == start:
            rest = render_message({**message, "content": message["content"][cut:]})
            segments.append(_Segment(rest.replace("]", ", continued]", 1)))
        else:
            segments.append(_Segment(render_message(message), str(message.get("role", "?")), index == last))
    return segments


def _references(members: Sequence[Sequence[Sequence[_Segment]]], new_id: Callable[[], str]) -> dict[str, str]:
    """Return an id for each long message that occurs in several trajectories, by its text."""
    counted = Counter(
        text
        for member in members
        for text in {s.text for shown in member for s in shown if s.role and not s.last}
        if len(text) >= _MIN_SHARED
    )
    return {text: new_id() for text, count in sorted(counted.items()) if count > 1}


def _texts(member: Sequence[Sequence[_Segment]], references: dict[str, str], new_id: Callable[[], str]) -> list[str]:
    """Return the text of each conversation of a trajectory, with references to messages that are shown elsewhere."""
    counted = Counter(s.text for shown in member for s in shown if s.role and len(s.text) >= _MIN_REPEATED)
    own: dict[str, str] = {}

    def text_of(segment: _Segment) -> str:
        text, role = segment.text, segment.role
        if not segment.last and text in references:
            return f"[{role}] (text {references[text]} of the context)"
        if not segment.last and text in own:
            return f"[{role}] (text {own[text]} again)"
        if counted[text] > 1 and text not in own:
            own[text] = new_id()
            return f"[text {own[text]}] {text}"
        return text

    return ["\n".join(map(text_of, shown)) for shown in member]
