"""A real HTTP server that plays a provider: answers as it is told and keeps what it got."""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.rollout_gateway.http_server import served

Script = list[bytes | float | None]
"""What a body is made of: bytes, pauses in seconds; `None`: the connection breaks there."""


@dataclass
class Reply:
    status: int = 200
    body: Script = field(default_factory=list)
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Got:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Provider:
    """Use it by `providing`."""

    def __init__(self) -> None:
        self.url = ""
        self.replies: list[Reply] = []
        """The next replies; the last one stays."""
        self.got: list[Got] = []
        self.broke: list[int] = []
        """Numbers of the requests whose client left."""

    def says(self, *replies: Reply) -> None:
        self.replies = list(replies)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        number, body = len(self.got), await request.read()
        self.got.append(Got(request.path_qs, {n.lower(): value for n, value in request.headers.items()}, body))
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        told = web.StreamResponse(status=reply.status, headers={"content-type": reply.kind, **reply.headers})
        if reply.kind != "text/event-stream" and None not in reply.body:
            told.content_length = sum(len(part) for part in reply.body if isinstance(part, bytes))
        try:
            for part in reply.body:
                if isinstance(part, float):
                    await asyncio.sleep(part)
                    continue
                await told.prepare(request)
                if part is None:
                    assert request.transport is not None
                    request.transport.abort()
                    break
                await told.write(part)
        except asyncio.CancelledError:
            self.broke.append(number)
            raise
        return told


@contextmanager
def providing() -> Iterator[Provider]:
    """A provider that answers while the block runs."""
    made = Provider()
    with served(made.answer) as url:
        made.url = f"{url}/v1"
        yield made


def whole(value: Any, **more: Any) -> Reply:
    return Reply(body=[json.dumps(value).encode()], **more)


def stream(*events: Any, ends: bool = True, pause_s: float = 0.0) -> Reply:
    """A stream of events: of bytes as they are, of values as data, under their `type` if they have one."""
    body: Script = []
    for event in events:
        if isinstance(event, dict):
            name = f"event: {event['type']}\n" if "type" in event else ""
            event = f"{name}data: {json.dumps(event)}\n\n".encode()
        body += [event, pause_s] if pause_s else [event]
    return Reply(body=body if ends else [*body, None], kind="text/event-stream")


USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 20,
    "total_tokens": 120,
    "prompt_tokens_details": {"cached_tokens": 40},
}


def completion(text: str = "the answer", **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "reasoning_content": "thought", **more}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if more.get("tool_calls") else "stop"}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "big-2026",
        "choices": [choice],
        "usage": USAGE,
        "service_tier": "default",
    }


def chunks(text: str = "the answer") -> list[Any]:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "big-2026"}

    def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    pieces = [chunk(content=word) for word in re.findall(r"\S+\s*", text)]
    calls = [
        chunk(
            tool_calls=[{"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}}]
        ),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": '{"at":'}}]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": '"a1"}'}}]),
    ]
    last = [chunk("tool_calls"), {**head, "choices": [], "usage": USAGE}, b"data: [DONE]\n\n"]
    return [chunk(role="assistant", content=""), *pieces, *calls, *last]


MESSAGE: Any = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "big-2026",
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "content": [
        {"type": "thinking", "thinking": "thought", "signature": "c2ln"},
        {"type": "text", "text": "the answer"},
        {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "a1"}},
    ],
    "usage": {
        "input_tokens": 50,
        "cache_read_input_tokens": 40,
        "cache_creation_input_tokens": 10,
        "output_tokens": 20,
    },
}


def message_events() -> list[Any]:
    usage = {**MESSAGE["usage"], "output_tokens": 1}
    deltas = [
        [{"type": "thinking_delta", "thinking": "thought"}, {"type": "signature_delta", "signature": "c2ln"}],
        [{"type": "text_delta", "text": "the "}, {"type": "text_delta", "text": "answer"}],
        [
            {"type": "input_json_delta", "partial_json": '{"at": '},
            {"type": "input_json_delta", "partial_json": '"a1"}'},
        ],
    ]
    starts = [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}},
    ]
    events: list[Any] = [
        {"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None, "usage": usage}},
        {"type": "ping"},
    ]
    for place, start in enumerate(starts):
        events.append({"type": "content_block_start", "index": place, "content_block": start})
        events += [{"type": "content_block_delta", "index": place, "delta": delta} for delta in deltas[place]]
        events.append({"type": "content_block_stop", "index": place})
    stop = {"stop_reason": "tool_use", "stop_sequence": None}
    return [*events, {"type": "message_delta", "delta": stop, "usage": {"output_tokens": 20}}, {"type": "message_stop"}]


RESPONSE: Any = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "big-2026",
    "status": "completed",
    "incomplete_details": None,
    "error": None,
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "output": [
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "thought"}],
            "encrypted_content": "gAAAA-sealed",
        },
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "the answer", "annotations": []}],
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_1",
            "name": "look",
            "arguments": '{"at":"a1"}',
            "status": "completed",
        },
    ],
    "usage": {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 40},
        "output_tokens": 20,
        "output_tokens_details": {"reasoning_tokens": 5},
        "total_tokens": 120,
    },
}


def response_events() -> list[Any]:
    items: list[Any] = RESPONSE["output"]
    events: list[Any] = [{"type": "response.created", "response": {**RESPONSE, "output": [], "status": "in_progress"}}]
    for place, item in enumerate(items):
        begun = {**item, "content": []} if item["type"] == "message" else item
        events.append({"type": "response.output_item.added", "output_index": place, "item": begun})
        if item["type"] == "message":
            at = {"item_id": item["id"], "output_index": place, "content_index": 0, "logprobs": []}
            events.append({"type": "response.content_part.added", **at, "part": {**item["content"][0], "text": ""}})
            events += [{"type": "response.output_text.delta", **at, "delta": text} for text in ("the ", "answer")]
        events.append({"type": "response.output_item.done", "output_index": place, "item": item})
    events.append({"type": "response.completed", "response": RESPONSE})
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]
