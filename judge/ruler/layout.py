"""The layout of RULER's prompt: text common to the trajectories once, the rest with each trajectory.

Attempts at one task share most of their text, and a prompt that repeats it costs money and exceeds the judge model's
context. `judge.ruler.prompt` puts the layout between lines with a random word, which no trajectory can know, and cuts
it if it is too long.

In common are the tools and messages with which all of them begin, and any long message of several trajectories. A
message that occurs more than once is replaced by a reference, with an id drawn for the call: to the common text, or to
where the same trajectory has it first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from judge.ruler.transcripts import Transcript, render_message, render_tools
from pipeline.chat.conversations import Conversation, Message

_MIN_SHARED = 1_000
"""Characters from which a message of several trajectories is shown once, wherever it stands."""
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
    """A piece of a conversation's text: a message, or a note about tools and common messages."""

    text: str
    role: str = ""
    """Empty if the text is no message."""
    is_last: bool = False
    """The last message of a conversation, which is always shown in its place."""


def _count_shared(conversations: Sequence[Sequence[Message]]) -> int:
    """Return how many leading messages all conversations share."""
    shared = 0
    for messages in zip(*conversations, strict=False):
        if any(m != messages[0] for m in messages[1:]):
            break
        shared += 1
    return shared


def build_layout(transcripts: Sequence[Transcript], new_id: Callable[[], str]) -> PromptLayout:
    """Return the texts of `transcripts` for a prompt: what they have in common, and the rest of each. `new_id` draws
    the ids of references, which no text of the trajectories can contain."""
    members = [t.conversations for t in transcripts]
    firsts = [m[0].messages for m in members]
    # Each trajectory keeps its last message, even if another one begins with all of its messages.
    shared = max(min(_count_shared(firsts), *(len(m) - 1 for m in firsts)), 0) if len(members) > 1 else 0
    tools = members[0][0].tools if all(m[0].tools == members[0][0].tools for m in members) else ()
    context = [render_tools(tools)] if tools else []
    context += [render_message(m) for m in firsts[0][:shared]]
    segments = [_segments_of(conversations, tools, shared) for conversations in members]
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


def _segments_of(conversations: Sequence[Conversation], tools: Tools, shared: int) -> list[list[_Segment]]:
    """Return the pieces of text of each conversation of a trajectory, without `tools` and the first `shared` messages
    of the first conversation, which are in the common text. A conversation's tools are among the pieces if they
    are not those of the conversation before."""
    out = []
    shown_tools = tools
    for number, conversation in enumerate(conversations):
        segments = []
        if conversation.tools != shown_tools:
            segments.append(_Segment(render_tools(conversation.tools) or "[tools] none"))
            shown_tools = conversation.tools
        start, last = shared if number == 0 else 0, len(conversation.messages) - 1
        if start and len(conversations) > 1:  # the judge could not tell which conversation they begin
            segments.append(_Segment(f"(messages 1 to {shared} are those of the context)"))
        for index, message in enumerate(conversation.messages[start:], start):
            segments.append(_Segment(render_message(message), str(message.get("role", "?")), is_last=index == last))
        out.append(segments)
    return out


def _references(members: Sequence[Sequence[Sequence[_Segment]]], new_id: Callable[[], str]) -> dict[str, str]:
    """Return an id for each long message that occurs in several trajectories, by its text. It is shown once, in the
    common text."""
    counts = Counter(
        text
        for member in members
        for text in {s.text for shown in member for s in shown if s.role and not s.is_last}
        if len(text) >= _MIN_SHARED
    )
    return {text: new_id() for text, count in sorted(counts.items()) if count > 1}


def _texts(member: Sequence[Sequence[_Segment]], references: dict[str, str], new_id: Callable[[], str]) -> list[str]:
    """Return the text of each conversation of a trajectory, with references to messages that are shown elsewhere: in
    the common text, or where this trajectory has them first."""
    counts = Counter(s.text for shown in member for s in shown if s.role and len(s.text) >= _MIN_REPEATED)
    repeated_ids: dict[str, str] = {}
    """The id under which a message that the trajectory repeats was shown in full, by its text."""

    def text_of(segment: _Segment) -> str:
        """Return the text of a segment, or a reference in its place."""
        text, role = segment.text, segment.role
        if not segment.is_last and text in references:
            return f"[{role}] (text {references[text]} of the context)"
        if not segment.is_last and text in repeated_ids:
            return f"[{role}] (text {repeated_ids[text]} again)"
        if counts[text] > 1 and text not in repeated_ids:
            repeated_ids[text] = new_id()
            return f"[text {repeated_ids[text]}] {text}"
        return text

    return ["\n".join(map(text_of, shown)) for shown in member]
