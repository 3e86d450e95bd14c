"""From a chat completion to a response of OpenAI's `/v1/responses`, whole or streamed."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import msgspec

from rollout_gateway.dialects.responses_input import CUSTOM_INPUT, ResponsesRequest, ToolName
from rollout_gateway.dialects.translate import sse

_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}
"""How the ids of output items begin."""


class ResponseWriter:
    """Writes one response."""

    def __init__(self, request: ResponsesRequest, prefix: str, names: dict[str, ToolName]) -> None:
        """`prefix` begins the response's id. `names` are the client's tools by the name that the model was shown."""
        self._request, self._prefix, self._names = request, prefix, names
        self.stored = False
        self._id = ""
        self._created = int(time.time())
        self._model = request.model
        self._items: list[dict[str, Any]] = []
        """Output items. The last one is being written while `_writing` is not empty."""
        self._writing = ""
        """Type of the item that is being written."""
        self._number = 0
        """Sequence number of the next event."""
        self._tool = -1
        """Index of the tool call that is being written."""
        self._arguments = ""
        """Its arguments so far."""
        self._finish = "stop"
        self._usage: dict[str, Any] | None = None

    def answer(self, completion: dict[str, Any]) -> dict[str, Any]:
        """Return the response of a whole chat completion."""
        self._take_head(completion)
        choice = completion["choices"][0]
        message = choice["message"]
        if message.get("reasoning"):
            self._add("reasoning", message["reasoning"])
        if message.get("content"):
            self._add("message", message["content"])
        for call in message.get("tool_calls") or ():
            item = self._add_call(call["id"], call["function"]["name"])
            _set_arguments(item, call["function"]["arguments"])
        self._finish = choice.get("finish_reason") or "stop"
        return self._response()

    # -- a stream ------------------------------------------------------------------------------------------------

    def take(self, chunk: dict[str, Any]) -> bytes:
        """Return the events of a chunk."""
        self._take_head(chunk)
        out = self._begin()
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            if delta.get("reasoning"):
                out += self._reasoning_delta(delta["reasoning"])
            if delta.get("content"):
                out += self._text_delta(delta["content"])
            for call in delta.get("tool_calls") or ():
                out += self._call_delta(call)
            self._finish = choice.get("finish_reason") or self._finish
        return out

    def end(self) -> bytes:
        """Return the last events."""
        out = self._begin() + self._close_item(cut=self._finish == "length")
        response = self._response()
        return out + self._event("response." + response["status"], response=response)

    def stream_error(self, error: dict[str, Any]) -> bytes:
        """Return the last events of a stream that failed."""
        if self._writing:
            item = self._items[-1]
            if "arguments" in item:
                item["arguments"] = self._arguments
            _mark_incomplete(item)
        self._finish, self._usage = "stop", None
        begun = self._begin()
        failed = {"status": "failed", "error": {"code": "server_error", "message": error.get("message")}}
        return begun + self._event("response.failed", response={**self._response(), **failed})

    def _begin(self) -> bytes:
        """The first events, if they have not been written."""
        if self._number:
            return b""
        response = {**self._response(), "status": "in_progress", "usage": None}
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _reasoning_delta(self, text: str) -> bytes:
        out = b""
        if self._writing != "reasoning":
            out += self._close_item()
            out += self._open_item(self._add("reasoning", ""), summary=[])
            part = _summary_part("")
            out += self._item_event("response.reasoning_summary_part.added", summary_index=0, part=part)
        self._items[-1]["summary"][0]["text"] += text
        return out + self._item_event("response.reasoning_summary_text.delta", summary_index=0, delta=text)

    def _text_delta(self, text: str) -> bytes:
        out = b""
        if self._writing != "message":
            out += self._close_item()
            out += self._open_item(self._add("message", ""), status="in_progress", content=[])
            part = _text_part("")
            out += self._item_event("response.content_part.added", content_index=0, part=part)
        self._items[-1]["content"][0]["text"] += text
        return out + self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def _call_delta(self, call: dict[str, Any]) -> bytes:
        function = call.get("function") or {}
        out = b""
        if call["index"] != self._tool:
            out += self._close_item()
            self._tool, self._arguments = call["index"], ""
            item = self._add_call(call.get("id", ""), function.get("name", ""))
            out += self._open_item(item, status="in_progress")
        if arguments := function.get("arguments"):
            self._arguments += arguments
            if self._writing == "function_call":  # the text of a custom tool is sent once it is complete
                out += self._item_event("response.function_call_arguments.delta", delta=arguments)
        return out

    def _open_item(self, item: dict[str, Any], **shown: Any) -> bytes:
        """Begin to write the item that was just added. `shown` replaces fields that are not complete."""
        self._writing = item["type"]
        shown = {**item, **shown}
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=shown)

    def _close_item(self, *, cut: bool = False) -> bytes:
        """Complete the item that is being written. `cut` says that the token limit ended it: no event says that it is
        done."""
        if not self._writing:
            return b""
        item = self._items[-1]
        kind, self._writing = self._writing, ""
        if kind == "reasoning":
            part = item["summary"][0]
            out = self._item_event("response.reasoning_summary_text.done", summary_index=0, text=part["text"])
            out += self._item_event("response.reasoning_summary_part.done", summary_index=0, part=part)
        elif kind == "message":
            part = item["content"][0]
            out = self._item_event(
                "response.output_text.done", content_index=0, text=part["text"], logprobs=[]
            )
            out += self._item_event("response.content_part.done", content_index=0, part=part)
        else:
            out = self._close_call(item, cut)
        if cut:
            _mark_incomplete(item)
        return out + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _close_call(self, item: dict[str, Any], cut: bool) -> bytes:
        _set_arguments(item, self._arguments)
        if item["type"] == "function_call":
            if cut:
                return b""
            done = {"arguments": item["arguments"], "name": item["name"]}
            return self._item_event("response.function_call_arguments.done", **done)
        out, text = b"", item["input"]
        if text:
            out = self._item_event("response.custom_tool_call_input.delta", delta=text)
        return out if cut else out + self._item_event("response.custom_tool_call_input.done", input=text)

    def _item_event(self, kind: str, **data: Any) -> bytes:
        """An event about the last item."""
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **data)

    def _event(self, kind: str, **data: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        return sse(kind, event)

    # -- its parts -----------------------------------------------------------------------------------------------

    def _take_head(self, completion: dict[str, Any]) -> None:
        """Note what a chat completion and each of its chunks say about the whole."""
        if not self._id:
            self._id = f"{self._prefix}-{completion.get('id', '')}"
            self._created = completion.get("created") or self._created
        self._model = completion.get("model", self._model)
        self._usage = completion.get("usage") or self._usage

    def _add(self, kind: str, text: str) -> dict[str, Any]:
        """Add an item of the model's reasoning, or a message."""
        item: dict[str, Any] = {"type": kind, "id": self._item_id(kind)}
        if kind == "reasoning":
            item["summary"] = [_summary_part(text)]
        else:
            item |= {"role": "assistant", "status": "completed", "content": [_text_part(text)]}
        self._items.append(item)
        return item

    def _add_call(self, call_id: str, flat: str) -> dict[str, Any]:
        """Add a tool call without its arguments. `flat` is the tool's name as the model knows it."""
        tool = self._names.get(flat) or ToolName(flat)
        kind = "custom_tool_call" if tool.custom else "function_call"
        item = {
            "type": kind, "id": self._item_id(kind), "call_id": call_id, "name": tool.name,
            "input" if tool.custom else "arguments": "", "status": "completed",
        }  # fmt: skip
        if tool.namespace:
            item["namespace"] = tool.namespace
        self._items.append(item)
        return item

    def _item_id(self, kind: str) -> str:
        """The id of the next item. It depends on the response only, so that reading it again gives the same."""
        digest = hashlib.sha256(f"{self._id} {len(self._items)}".encode()).hexdigest()
        return f"{_PREFIXES[kind]}_{digest[:24]}"

    def _response(self) -> dict[str, Any]:
        request, items, usage = self._request, self._items, self._usage
        cut = self._finish == "length"
        if cut and items:
            _mark_incomplete(items[-1])
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "model": self._model,
            "output": items,
            "instructions": request.instructions,
            "metadata": request.metadata or {},
            "max_output_tokens": request.max_output_tokens,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "tool_choice": request.tool_choice or "auto",
            "tools": msgspec.to_builtins(request.tools or []),
            "previous_response_id": request.previous_response_id,
            "store": self.stored and request.store is not False,
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "usage": _usage(usage) if usage else None,
        }


def _mark_incomplete(item: dict[str, Any]) -> None:
    if "status" in item:
        item["status"] = "incomplete"


def _set_arguments(item: dict[str, Any], arguments: str) -> None:
    """Set a call's arguments as the model wrote them, or the text in them if the tool is a custom one."""
    if item["type"] == "function_call":
        item["arguments"] = arguments
        return
    try:
        values = msgspec.json.decode(arguments or "null")
    except msgspec.DecodeError:
        values = None
    has_input = isinstance(values, dict) and CUSTOM_INPUT in values
    item["input"] = str(values[CUSTOM_INPUT]) if has_input else arguments


def _summary_part(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage.get("completion_tokens", 0),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
