"""Text that the trajectories of a call have in common is shown once."""

from __future__ import annotations

import itertools

import pytest

from judge.ruler.layout import PromptLayout, build_layout, count_shared
from judge.ruler.transcripts import Transcript
from pipeline.chat.conversations import Conversation
from tests.judge.kit import single, transcript

LONG = "a manual of many words; " * 100


def shown(*transcripts: Transcript) -> PromptLayout:
    numbers = itertools.count(1)
    return build_layout(transcripts, lambda: f"id{next(numbers)}")


def text(layout: PromptLayout, member: int = 0) -> str:
    return "\n".join(p.text for p in layout.members[member])


def test_the_shared_prefix_ends_at_the_first_different_message() -> None:
    def prefix(*transcripts: Transcript) -> int:
        return count_shared([t.last_conversation.messages for t in transcripts])

    assert prefix(transcript("a", "x", "y"), transcript("b", "x", "z")) == 2
    assert prefix(transcript("a", "x"), transcript("b", "x", "z")) == 2
    assert prefix(transcript("a", task="1"), transcript("b", task="2")) == 0
    assert prefix() == 0


def test_the_last_message_of_each_trajectory_is_never_shared() -> None:
    layout = shown(transcript("a", "x"), transcript("b", "x", "z"))
    assert (layout.context, text(layout, 0), text(layout, 1)) == (
        "[user] Win the game.",
        "[assistant] x",
        "[assistant] x\n[assistant] z",
    )


def test_a_single_trajectory_shares_nothing() -> None:
    layout = shown(transcript("a", "x"))
    assert (layout.context, text(layout)) == ("", "[user] Win the game.\n[assistant] x")


def test_the_long_beginning_of_a_message_is_shared_too() -> None:
    layout = shown(*(transcript(f"t{i}", "x", task=f"{LONG}\nPlay seat {i}.") for i in range(3)))
    assert layout.context == f"[user] {LONG}\nPlay seat \n(this message goes on in each attempt)"
    assert text(layout, 1) == "[user, continued] 1.\n[assistant] x"
    short = shown(*(transcript(f"t{i}", "x", task=f"Play seat {i}.") for i in range(3)))
    assert short.context == ""


def test_a_long_message_that_occurs_several_times_is_shown_once() -> None:
    """One member without the common system prompt must not make all others carry it."""
    others = [transcript(f"t{i}", LONG, f"move {i}", task="Go.") for i in range(3)]
    layout = shown(*others, transcript("odd", "move 9", task="Go on."))
    assert layout.context == f"[text id1] [assistant] {LONG}"
    assert text(layout, 2) == "[user] Go.\n[assistant] (text id1 of the context)\n[assistant] move 2"
    assert text(layout, 3) == "[user] Go on.\n[assistant] move 9"


def test_the_last_message_is_never_moved() -> None:
    layout = shown(transcript("a", LONG, task="1"), transcript("b", LONG, task="2"))
    assert layout.context == ""
    assert LONG in text(layout, 0)
    assert LONG in text(layout, 1)


def test_tools_are_shown_once_where_all_have_them() -> None:
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"})
    tools = ({"type": "function", "function": {"name": "look"}},)
    same = shown(single("a", messages, tools), single("b", messages, tools))
    assert same.context == '[tools] [{"type":"function","function":{"name":"look"}}]\n[user] hi'
    other = shown(single("a", messages, tools), single("b", messages))
    assert text(other, 0).startswith("[tools] ")
    assert text(other, 1) == "[assistant] x"


def test_conversations_have_labels_and_repeated_messages_become_references() -> None:
    first = tuple(
        {"role": r, "content": f"{r} {i} {'…' * 200}"} for i, r in enumerate(("user", "assistant", "tool"))
    )
    more = ({"role": "assistant", "content": "again"},)
    tools = ({"type": "function"},)
    several = Transcript(
        "a",
        (
            Conversation(first, (), "calls 1 to 2"),
            Conversation(first[:2] + more, (), "call 3"),
            Conversation((more[0], more[0]), tools, "call 4"),
        ),
    )
    one, two, three = shown(several).members[0]
    assert [p.label for p in (one, two, three)] == [
        "conversation 1 of 3: calls 1 to 2",
        "conversation 2 of 3: call 3",
        "conversation 3 of 3: call 4",
    ]
    texts = [f"[{m['role']}] {m['content']}" for m in first]
    assert one.text == f"[text id1] {texts[0]}\n[text id2] {texts[1]}\n{texts[2]}"
    assert two.text == "[user] (text id1 again)\n[assistant] (text id2 again)\n[assistant] again"
    assert three.text == '[tools] [{"type":"function"}]\n[assistant] again\n[assistant] again'  # too short


@pytest.mark.parametrize("content", [None, [{"type": "text", "text": LONG}]])
def test_a_message_that_is_no_plain_text_is_not_split(content: object) -> None:
    a, b = ({"role": "user", "content": content, "n": i} for i in (1, 2))
    layout = shown(single("a", (a, {"role": "assistant"})), single("b", (b, {"role": "assistant"})))
    assert "continued" not in text(layout)
