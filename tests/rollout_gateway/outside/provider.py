"""A real HTTP server that plays a provider: answers as it is told and keeps what it got."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from dataclasses import dataclass, field
from typing import Any

import uvicorn

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


class _Server(uvicorn.Server):
    """uvicorn, which at a forced exit leaves the connections open whose answers are under way: their sockets would be
    closed by the garbage collector, with a warning in another test."""

    async def shutdown(self, sockets: Any = None) -> None:
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        while self.server_state.connections:
            await asyncio.sleep(0)


class Provider:
    """Use it as a context manager."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        """The next replies; the last one stays."""
        self.got: list[Got] = []
        self.broke: list[int] = []
        """Numbers of the requests whose client left."""
        self._server = _Server(
            uvicorn.Config(
                self._app, host="127.0.0.1", port=0, log_config=None, lifespan="off", ws="none", interface="asgi3"
            )
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}/v1"

    def __enter__(self) -> Provider:
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(30)

    def says(self, *replies: Reply) -> None:
        self.replies = list(replies)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        number = len(self.got)
        self.got.append(Got((scope["raw_path"] + query).decode(), headers, body))
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        more_headers = [(name.encode(), value.encode()) for name, value in reply.headers.items()]
        if reply.kind != "text/event-stream" and None not in reply.body:
            length = sum(len(part) for part in reply.body if isinstance(part, bytes))
            more_headers.append((b"content-length", b"%d" % length))
        leaving = asyncio.ensure_future(receive())
        leaving.add_done_callback(lambda _: self.broke.append(number))
        if reply.body and isinstance(reply.body[0], float):
            await asyncio.sleep(reply.body[0])
        await send(
            {
                "type": "http.response.start",
                "status": reply.status,
                "headers": [(b"content-type", reply.kind.encode()), *more_headers],
            }
        )
        for part in reply.body:
            if part is None:
                return
            if isinstance(part, float):
                await asyncio.sleep(part)
            else:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


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
