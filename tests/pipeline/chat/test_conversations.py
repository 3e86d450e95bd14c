"""Which conversations a trajectory's exchanges make."""

import json
from typing import Any

import msgspec
import pytest

from pipeline.chat.conversations import Conversation, build_conversations, text_of
from pipeline.events import ExchangeRecorded
from tests.judge.kit import exchange

Message = dict[str, Any]


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def said(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def call(seq: int, messages: list[Message], reply: Message | None, choice: int = 0, **fields: Any) -> ExchangeRecorded:
    request = {"messages": messages, **fields.pop("request", {})}
    response = {"choices": [{"message": reply}]} if reply is not None else {}
    return msgspec.structs.replace(
        exchange("t", ""),
        seq=seq,
        choice=choice,
        request=json.dumps(request).encode(),
        response=json.dumps(response).encode(),
        **fields,
    )


def texts(conversation: Conversation) -> list[Any]:
    return [m.get("content") for m in conversation.messages]


def test_the_text_of_a_message_has_each_of_its_parts_and_nothing_for_null() -> None:
    assert text_of(None) == ""
    assert text_of([{"type": "text", "text": "a"}, "b", {"type": "audio"}]) == "a\nb\n(audio)"
    assert text_of([{"type": "text", "text": None}]) == "(text)"


def test_every_choice_is_shown_and_the_chosen_one_is_continued() -> None:
    first = [call(0, [user("a")], said(f"c{i}"), choice=i) for i in range(3)]
    then = call(1, [user("a"), said("c1"), user("b")], said("end"))
    found, last = build_conversations([*first, then])
    assert [texts(c) for c in found] == [["a", "c0"], ["a", "c1", "b", "end"], ["a", "c2"]]
    assert [c.calls for c in found] == [
        "call 1, choice 1 of call 1",
        "calls 1 to 2, choice 2 of call 1",
        "call 1, choice 3 of call 1",
    ]
    assert last == 1


def test_a_sub_agent_has_a_conversation_of_its_own() -> None:
    main = [user("task"), said("ask the helper")]
    found, last = build_conversations(
        [
            call(0, main[:1], main[1]),
            call(1, [user("helper's task")], said("h1")),
            call(2, [user("helper's task"), said("h1"), user("more")], said("h2")),
            call(3, [*main, user("the helper said h2")], said("done")),
        ]
    )
    assert [texts(c) for c in found] == [
        ["task", "ask the helper", "the helper said h2", "done"],
        ["helper's task", "h1", "more", "h2"],
    ]
    assert [c.calls for c in found] == ["calls 1, 4", "calls 2 to 3"]
    assert last == 0


def test_a_shortened_history_is_a_new_conversation() -> None:
    long = [user("task"), said("r0"), user("u0"), said("r1"), user("u1")]
    found, last = build_conversations(
        [
            call(0, long[:1], long[1]),
            call(1, long[:3], long[3]),
            call(2, [long[0], user("summary"), *long[3:]], said("r2")),
        ]
    )
    assert [texts(c) for c in found] == [["task", "r0", "u0", "r1"], ["task", "summary", "r1", "u1", "r2"]]
    assert last == 1


def test_a_reply_that_comes_back_without_its_reasoning_is_the_same_message() -> None:
    tool = {"id": "x", "type": "function", "function": {"name": "look", "arguments": '{"at": 1, "b": 2}'}}
    sent = {**tool, "id": "y", "function": {"name": "look", "arguments": '{"b":2,"at":1}'}}
    reply = said(None, reasoning_content="hm", tool_calls=[tool], refusal=None, annotations=[])
    (found,), _ = build_conversations(
        [
            call(0, [user("a")], reply),
            call(1, [user([{"type": "text", "text": "a"}]), said("", tool_calls=[sent]), user("b")], said("c")),
        ]
    )
    assert found.messages[1] == reply
    assert len(found.messages) == 4


def test_side_calls_are_read_only_where_there_is_nothing_else() -> None:
    title = call(0, [user("a title?")], said("T"), side_call=True)
    (found,), _ = build_conversations([title, call(1, [user("a")], said("b"))])
    assert texts(found) == ["a", "b"]
    (found,), _ = build_conversations([title])
    assert texts(found) == ["a title?", "T"]
    assert build_conversations([]) == ((), 0)


@pytest.mark.parametrize("kept", [False, True])
def test_a_reply_that_broke_off_is_kept_unless_the_agent_continued_without_it(kept: bool) -> None:
    broken = call(0, [user("a")], said("hal"), status="cancelled")
    again = call(1, [user("a"), said("hal"), user("go on")] if kept else [user("a")], said("whole"))
    (found,), _ = build_conversations([broken, again])
    assert texts(found) == (["a", "hal", "go on", "whole"] if kept else ["a", "whole"])
    (found,), _ = build_conversations([broken])
    assert texts(found) == ["a", "hal"]


def completion(seq: int, prompt: Any, text: str, choice: int = 0, **request: Any) -> ExchangeRecorded:
    return msgspec.structs.replace(
        exchange("t", ""),
        seq=seq,
        choice=choice,
        endpoint="/v1/completions",
        request=json.dumps({"prompt": prompt, **request}).encode(),
        response=json.dumps({"choices": [{"text": text}]}).encode(),
    )


def test_plain_completions_are_read_too() -> None:
    """The judge once saw nothing at all of an agent that uses /v1/completions."""
    (found,), _ = build_conversations(
        [completion(0, "Q: 1+1\nA:", " 2"), completion(1, "Q: 1+1\nA: 2\nQ: 2+2\nA:", " 4")]
    )
    assert found.messages == (
        {"role": "prompt", "content": "Q: 1+1\nA:"},
        {"role": "assistant", "content": " 2"},
        {"role": "prompt", "content": "\nQ: 2+2\nA:"},
        {"role": "assistant", "content": " 4"},
    )
    several = [completion(0, ["a", "b"], f"r{i}", choice=i, n=2) for i in range(4)]
    found_all, _ = build_conversations(several)
    assert [texts(c) for c in found_all] == [["a", "r0"], ["a", "r1"], ["b", "r2"], ["b", "r3"]]
    (found,), _ = build_conversations([completion(0, [1, 2, 3], "x")])
    assert texts(found) == ["(3 token ids)", "x"]


def followed(exchanges: list[ExchangeRecorded]) -> dict[int, list[Any]]:
    """The texts of what followed each reply that had a call of its own."""
    found, _ = build_conversations(exchanges)
    return {r.call: [m["content"] for m in c.follow_up(r)] for c in found for r in c.replies}


def test_what_followed_a_reply_is_what_the_conversation_s_next_call_sent_behind_it() -> None:
    one, two = ([user("a")], [user("a"), said("r0"), user("no"), said("own"), {"role": "tool", "content": "exit 1"}])
    chat = [call(0, one, said("r0")), call(1, two, said("r1"))]
    assert followed(chat) == {0: ["no", "own", "exit 1"], 1: []}
    reminded = call(1, [*one, said("r0"), {"role": "system", "content": "Be kind."}], said("r1"))
    assert followed([chat[0], reminded]) == {0: [], 1: []}
    shortened = call(2, [user("so far: r0, r1"), user("wrong")], said("r2"))
    assert followed([*chat, shortened]) == {0: ["no", "own", "exit 1"], 1: [], 2: []}
    rewritten = call(1, [*one, said("R0"), user("no")], said("r1"))
    assert followed([chat[0], rewritten]) == {0: [], 1: []}


def test_a_reply_without_a_call_of_its_own_is_followed_by_nothing() -> None:
    twice = [call(0, [user("a")], said("x"), choice=choice) for choice in (0, 1)]
    after = call(1, [user("a"), said("x"), user("b")], said("y"))
    last = call(2, [user("a"), said("x"), user("b"), said("y"), user("c")], said("z"))
    assert followed([*twice, after, last]) == {1: ["c"], 2: []}
    cancelled = msgspec.structs.replace(after, status="cancelled")
    assert followed([*twice, cancelled, last]) == {2: []}
    assert followed([call(0, [user("title")], said("t"), side_call=True)]) == {}


def test_what_no_inference_server_took_does_not_end_a_reader() -> None:
    """Calls that an agent broke off are recorded unchecked."""
    for body in (b"", b"[]", b"{}", b'{"messages": 3}', b'{"messages": [1, "a", null]}'):
        none = msgspec.structs.replace(exchange("t", "x"), request=body, response=b'{"choices": [3]}')
        assert build_conversations([none])[0][0].messages == ()
    raw = b'{"messages": [{"role": "user", "content": %b}]}' % (b'{"a":' * 50_000 + b"1" + b"}" * 50_000)
    odd = call(0, [user("a") | {"name": [1]}, user([{"type": "image_url", "image_url": "data:;base64,\u00e9"}])], None)
    found, _ = build_conversations([odd, msgspec.structs.replace(odd, seq=1, request=raw)])
    assert [len(c.messages) for c in found] == [2, 0]
