"""`/v1/responses` from chat completions and their chunks, without a server."""

import json
from typing import Any
from unittest.mock import Mock

import pytest

from rollout_gateway.dialects.endpoints import read_chat
from rollout_gateway.dialects.messages import MessagesTranslation, error_body
from rollout_gateway.dialects.responses import ResponsesTranslation
from rollout_gateway.dialects.responses_input import Tools
from rollout_gateway.dialects.translate import TranslatedSink
from rollout_gateway.http.errors import ApiError
from tests.rollout_gateway.dialects.kit import CODEX, RESPONSE_TOOL


def test_a_call_is_what_its_chat_request_reads_as() -> None:
    """A translated call and the same chat completion, posted by a client, are one call: also their hashes are equal."""
    body = {
        "model": "m",
        "stream": True,
        "temperature": 0.5,
        "seed": 3,
        "max_output_tokens": 9,
        "input": "x",
        "tools": CODEX,
    }
    message = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}], "logit_bias": {"1": 2}}
    for translation in (
        ResponsesTranslation(json.dumps(body).encode()),
        MessagesTranslation(json.dumps(message).encode()),
    ):
        call = translation.call()
        posted = read_chat(call.body)
        assert (call.fields, call.stream, call.choices) == (posted.fields, posted.stream, posted.choices)
        assert call.params.model == posted.params.model
        posted.endpoint = call.endpoint
        assert call.hash() == posted.hash()


def test_a_choice_that_names_no_tool_is_refused() -> None:
    def choice(asked: Any, tools: Any = CODEX) -> Any:
        body = {"model": "m", "input": "x", "tools": tools, "tool_choice": asked}
        return ResponsesTranslation(json.dumps(body).encode()).chat().get("tool_choice")

    assert choice({"type": "function", "name": "mcp__games__move"})["function"]["name"] == "mcp__games__move"
    assert choice({"type": "custom", "name": "apply_patch"})["function"]["name"] == "apply_patch"
    assert choice("required") == "required"
    assert choice("auto", [{"type": "web_search"}]) is None
    for wrong in ({"type": "web_search"}, {"type": "function", "name": "nope"}, {"type": "allowed_tools", "tools": []}):
        with pytest.raises(ApiError, match="tool_choice"):
            choice(wrong)
    with pytest.raises(ApiError, match="tool_choice"):  # it is in another namespace
        choice({"type": "function", "name": "move", "namespace": "mcp__chess"})
    with pytest.raises(ApiError, match="'telepathy'"):
        choice("auto", [{"type": "telepathy"}])
    assert Tools([]).chat == []


def test_an_output_of_a_tool_that_the_model_is_not_shown_is_refused_with_the_reason() -> None:
    def chat(kind: str, output: Any) -> dict[str, Any]:
        items = [
            {"type": kind, "call_id": "c", "name": "f"},
            {"type": f"{kind}_output", "call_id": "c", "output": output},
        ]
        return ResponsesTranslation(json.dumps({"model": "m", "input": items}).encode()).chat()

    for tool, output in (
        ("apply_patch", "done"),
        ("local_shell", "done"),
        ("shell", [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]),
        ("computer", {"type": "computer_screenshot", "image_url": "data:"}),
    ):
        with pytest.raises(ApiError, match=f"is not shown tools of type '{tool}'"):
            chat(f"{tool}_call", output)
    assert chat("function_call", [{"type": "input_text", "text": "done"}])["messages"][-1]["content"] == "done"
    with pytest.raises(ApiError, match="output of call 'c'"):
        chat("function_call", 3)


def test_reasoning_items_of_a_turn_are_one_message() -> None:
    """Around a search that OpenAI's server made, and after the text."""
    first, second = (
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]} for text in ("Search.", "Found.")
    )
    items = [first, {"type": "web_search_call"}, second, {"role": "assistant", "content": "a1"}, second]
    body = {"model": "m", "input": items}
    (said,) = ResponsesTranslation(json.dumps(body).encode()).chat()["messages"]
    assert said == {"role": "assistant", "content": "a1", "reasoning": "Search.\n\nFound.Found."}


def streamed(deltas: list[dict[str, Any]], finish: str | None, **asked: Any) -> list[dict[str, Any]]:
    body = {"model": "m", "input": "x", "stream": True, **asked}
    written = b""
    stream = TranslatedSink(Mock(), ResponsesTranslation(json.dumps(body).encode()))
    for number, delta in enumerate(deltas):
        reason = finish if number == len(deltas) - 1 else None
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        chunk = {"id": "chatcmpl-1", "created": 7, "model": "m@0", "choices": [choice]}
        written += stream.translate(b"data: %b\n\n" % json.dumps(chunk).encode())
    written += stream.last_events()
    return [json.loads(e.partition(b"data: ")[2]) for e in written.split(b"\n\n") if e]


def call_delta(arguments: str | None, **function: str) -> dict[str, Any]:
    if arguments is not None:
        function["arguments"] = arguments
    return {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]}


@pytest.mark.parametrize("cut", [None, "", "{", '{"cell": "a'])
def test_a_call_that_is_cut_says_so_and_invents_nothing(cut: str | None) -> None:
    deltas = [call_delta(None, name="move"), *([call_delta(cut)] if cut is not None else []), {}]
    events = streamed(deltas, "length", tools=[RESPONSE_TOOL])
    assert "response.function_call_arguments.done" not in [e["type"] for e in events]
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    for item in (response["output"][0], events[-2]["item"]):
        assert (item["status"], item["arguments"]) == ("incomplete", cut or "")
    whole = streamed([call_delta('{"cell": "a1"}', name="move"), {}], "tool_calls", tools=[RESPONSE_TOOL])
    assert whole[-1]["response"]["output"][0]["status"] == "completed"


def test_a_custom_tool_gets_its_text() -> None:
    deltas = [call_delta(None, name="apply_patch"), call_delta('{"input": "*** Be'), call_delta('gin\\n"}'), {}]
    events = streamed(deltas, "tool_calls", tools=CODEX)
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\n")
    assert "response.custom_tool_call_input.done" in [e["type"] for e in events]
    history = [item, {"type": "custom_tool_call_output", "call_id": "call_1", "output": "ok"}]
    body = {"model": "m", "input": history, "tools": CODEX}
    said, result = ResponsesTranslation(json.dumps(body).encode()).chat()["messages"]
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"input": "*** Begin\n"}
    assert (result["role"], result["content"]) == ("tool", "ok")


@pytest.mark.parametrize("body", [b"Internal Server Error", b'{"detail": "x"}', b'{"error": "x"}', b"\xff", b""])
def test_an_error_that_is_not_in_openais_format_reads_as_anthropics(body: bytes) -> None:
    told = json.loads(error_body(MessagesTranslation.path, body, 500))
    assert told["error"] == {"type": "api_error", "message": body.decode(errors="replace")}
