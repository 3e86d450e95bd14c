"""What a thinking model said goes back to it: through `/v1/messages` and `/v1/responses` its template gets what a chat
completion's `reasoning` gives it."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_gateway.dialects.messages import MessagesTranslation
from rollout_gateway.dialects.responses import ResponsesTranslation
from rollout_gateway.dialects.translate import Translation
from rollout_gateway.http.errors import ApiError
from tests.rollout_gateway.dialects.kit import CODEX, completion, recorded

USER = {"role": "user", "content": "Which cell?"}
TOOLS = [{"name": "exec", "input_schema": {"type": "object"}}]


def tool_call(number: int, arguments: str = '{"cell":"a1"}') -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": "exec", "arguments": arguments}}


def said(reasoning: str, content: str, calls: int) -> dict[str, Any]:
    """The assistant's message as a chat completion's client sends it back."""
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = [tool_call(i) for i in range(calls)]
    return message


def translated(kind: type[Translation], **body: Any) -> Translation:
    return kind(json.dumps({"model": "m", **body}).encode())


def results(calls: int) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": f"call_{i}", "content": "ok"} for i in range(calls)]


turns = st.tuples(st.text(max_size=20), st.text(max_size=20), st.integers(0, 3)).filter(lambda t: t[1] or t[2])


@given(turns)
def test_messages_give_the_model_its_own_turn_again(turn: tuple[str, str, int]) -> None:
    message = said(*turn)
    answer = translated(MessagesTranslation, messages=[USER]).answer(completion(message))
    outcome = [
        {"type": "tool_result", "tool_use_id": f"call_{i}", "content": [{"type": "text", "text": "ok"}]}
        for i in range(turn[2])
    ]
    history = [USER, {"role": "assistant", "content": answer["content"]}]
    history += [{"role": "user", "content": outcome}] if outcome else []
    chat = translated(MessagesTranslation, messages=history, tools=TOOLS).chat()
    assert chat["messages"] == [USER, message, *results(turn[2])]


@given(turns, st.sampled_from(["items", "encoded", "references", "previous"]))
def test_responses_give_the_model_its_own_turn_again(turn: tuple[str, str, int], way: str) -> None:
    message = said(*turn)
    asked: dict[str, Any] = {"tools": CODEX, "instructions": "Play."}
    if way == "encoded":
        asked |= {"include": ["reasoning.encrypted_content"], "store": False}
    answer = translated(ResponsesTranslation, input=[USER], **asked).answer(completion(message))
    request = {"model": "m", "messages": [{"role": "system", "content": "Play."}, USER]}
    exchange = recorded(request, message)
    back = [USER, *answer["output"]]
    if way == "encoded":
        back = [item | {"summary": []} if item.get("type") == "reasoning" else item for item in back]
    elif way == "references":
        back = [USER, *({"type": "item_reference", "id": item["id"]} for item in answer["output"])]
    elif way == "previous":
        asked["previous_response_id"], back = answer["id"], []
    back += [{"type": "function_call_output", "call_id": f"call_{i}", "output": "ok"} for i in range(turn[2])]
    translation = translated(ResponsesTranslation, input=back, **asked)
    assert translation.referenced_ids == ({"chatcmpl-7f"} if way in ("references", "previous") else set())
    chat = translation.chat({"chatcmpl-7f": exchange})
    system = {"role": "system", "content": "Play."}
    assert chat["messages"] == [system, USER, message, *results(turn[2])]


def test_reasoning_that_no_answer_followed_stays_a_turn() -> None:
    """As in the record of the call, which the token limit ended."""
    cut_off = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Well"}]}
    chat = translated(ResponsesTranslation, input=[USER, cut_off, USER]).chat()
    assert chat["messages"] == [USER, {"role": "assistant", "content": None, "reasoning": "Well"}, USER]
    stranger = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA_of another server"}
    with pytest.raises(ApiError, match="encrypted_content"):
        translated(ResponsesTranslation, input=[USER, stranger]).chat()
    encoded = base64.b64encode("é".encode()).decode()
    known = stranger | {"encrypted_content": encoded}
    chat = translated(ResponsesTranslation, input=[USER, known, {"role": "assistant", "content": "a1"}]).chat()
    assert chat["messages"][1] == {"role": "assistant", "content": "a1", "reasoning": "é"}


@pytest.mark.parametrize("name", ["fc_abc", "item_1", "fc_1-", "", "fc_3-chatcmpl-7f"])
def test_a_reference_to_another_servers_item_or_past_the_recorded_calls_is_refused(name: str) -> None:
    exchange = recorded({}, said("", "a1", 1))
    with pytest.raises(ApiError, match=r"item_reference") as refused:
        translated(ResponsesTranslation, input=[USER, {"type": "item_reference", "id": name}]).chat(
            {"chatcmpl-7f": exchange}
        )
    assert refused.value.code == "previous_response_not_found"


def result(**block: Any) -> Any:
    use = {"type": "tool_use", "id": "u", "name": "exec", "input": {}}
    history = [
        USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u", **block}]},
    ]
    return translated(MessagesTranslation, messages=history).chat()["messages"][2]["content"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def test_nothing_in_a_tool_result_is_dropped() -> None:
    assert result(content="7") == "7"
    assert result(content="no such file", is_error=True) == "Error: no such file"
    assert result(content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "a\nb"
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert result(content=[{"type": "text", "text": "a"}, IMAGE]) == [{"type": "text", "text": "a"}, shown]
    assert result(content=[IMAGE], is_error=True) == [{"type": "text", "text": "Error:"}, shown]
    document = {"type": "document", "title": "Rules", "source": {"type": "text", "data": "Three in a row."}}
    assert result(content=[document]) == "Rules\nThree in a row."
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
    for refused in (pdf, {"type": "search_result"}):
        with pytest.raises(ApiError, match="not supported"):
            result(content=[refused])


@pytest.mark.parametrize(
    "source", [None, "AAAA", {}, {"type": "base64", "media_type": "image/png"}, {"type": "url"}, {"type": "file"}]
)
def test_an_image_without_data_is_refused_by_its_place(source: Any) -> None:
    image = {"type": "image", "source": source}
    history = [USER, {"role": "user", "content": [{"type": "text", "text": "a"}, image]}]
    with pytest.raises(ApiError) as refused:
        translated(MessagesTranslation, messages=history)
    assert (refused.value.status, refused.value.code) == (400, "invalid_body")
    assert str(refused.value.param).startswith("messages[1].content[1]")


@pytest.mark.parametrize("part", [{"type": "input_file", "file_data": "AA"}, {"type": "input_image", "file_id": "f"}])
def test_parts_of_responses_that_can_not_be_translated_are_refused(part: dict[str, Any]) -> None:
    for item in (
        {"role": "user", "content": [part]},
        {"type": "function_call_output", "call_id": "c", "output": [part]},
    ):
        with pytest.raises(ApiError, match="not supported"):
            translated(ResponsesTranslation, input=[USER, item]).chat()


def test_a_deferred_tool_is_shown_where_a_search_found_it() -> None:
    tools = [*TOOLS, {"name": "move", "input_schema": {"type": "object"}, "defer_loading": True}]

    def chat(*found: str) -> dict[str, Any]:
        references = [{"type": "tool_reference", "tool_name": name} for name in found]
        results = [{"type": "tool_result", "tool_use_id": "u", "content": references}]
        return translated(MessagesTranslation, messages=[{"role": "user", "content": results}], tools=tools).chat()

    asked = chat("move")
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["exec"]
    (result,) = asked["messages"]
    assert json.loads(result["content"])["function"]["name"] == "move"
    with pytest.raises(ApiError, match="tool_reference"):
        chat("jump")


@pytest.mark.parametrize("text", ['{"cell": ', "a1", "[1]", '{"cell":"a1"} '])
def test_malformed_arguments_keep_their_text(text: str) -> None:
    message = said("", "", 0) | {"tool_calls": [tool_call(0, text)]}
    (block,) = translated(MessagesTranslation, messages=[USER]).answer(completion(message))["content"]
    claude_code = block | {"input": {"__unparsedToolInput": text}}
    for sent in (block, claude_code):
        history = [USER, {"role": "assistant", "content": [sent]}]
        (call,) = translated(MessagesTranslation, messages=history).chat()["messages"][1]["tool_calls"]
        kept = call["function"]["arguments"]
        assert kept == text or json.loads(kept) == json.loads(text)


def test_tokens_that_vllm_counts_are_passed_on() -> None:
    """vLLM's details are null, or lack a number, where it does not count."""
    answer = completion({"role": "assistant", "content": "ok"})
    for details, cached, reasoned in (
        ({}, 0, 0),
        ({"prompt_tokens_details": None, "completion_tokens_details": {"reasoning_tokens": None}}, 0, 0),
        ({"prompt_tokens_details": {"cached_tokens": 16}, "completion_tokens_details": {"reasoning_tokens": 5}}, 16, 5),
    ):
        told = answer | {"usage": answer["usage"] | details}
        usage = translated(ResponsesTranslation, input="go").answer(told)["usage"]
        assert usage["input_tokens_details"] == {"cached_tokens": cached}
        assert usage["output_tokens_details"] == {"reasoning_tokens": reasoned}
