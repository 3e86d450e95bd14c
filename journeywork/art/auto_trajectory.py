"""Build a trajectory of the calls that a coroutine makes, with whatever client it makes them."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Literal, overload

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from journeywork.art.openai import StreamedCompletion
from journeywork.art.refused import refusing
from journeywork.art.trajectories import History, Trajectory, get_messages

_current: contextvars.ContextVar[Trajectory | None] = contextvars.ContextVar("auto_trajectory", default=None)
_PATH = "/chat/completions"
__getattr__ = refusing(__name__)


@overload
def auto_trajectory(*, required: Literal[True]) -> Trajectory: ...


@overload
def auto_trajectory(*, required: Literal[False] = False) -> Trajectory | None: ...


def auto_trajectory(*, required: bool = False) -> Trajectory | None:
    """Return the trajectory that the running `capture_auto_trajectory` builds, to set its reward for example.

    Returns `None` outside of one, or raises `RuntimeError` if `required`."""
    current = _current.get()
    if current is None and required:
        raise RuntimeError("auto_trajectory(required=True) must be called inside capture_auto_trajectory")
    return current


async def capture_auto_trajectory(coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
    """Run a coroutine, and return a trajectory of the chat completions that it got over httpx (as the clients of OpenAI
    and litellm do it).

    A call that continues a conversation of the trajectory is added to it; any other call begins an additional
    history."""
    _listen()
    trajectory = Trajectory()
    token = _current.set(trajectory)
    try:
        await coroutine
    finally:
        _current.reset(token)
    return trajectory.finish()


def _add(trajectory: Trajectory, request: dict[str, Any], reply: ChatCompletion) -> None:
    """Add a call to the conversation that it continues."""
    messages, choice = list(request.get("messages") or []), reply.choices[0]
    tools = request.get("tools")
    conversations: list[Trajectory | History] = [trajectory, *trajectory.additional_histories]
    for conversation in conversations:
        earlier = conversation.messages_and_choices
        if not earlier and conversation is trajectory:
            conversation.tools = tools
        if _continues(get_messages(earlier), messages) and conversation.tools == tools:
            earlier += [*messages[len(earlier) :], choice]
            return
    trajectory.additional_histories.append(History(messages_and_choices=[*messages, choice], tools=tools))


def _continues(earlier: list[Any], messages: list[Any]) -> bool:
    return len(earlier) <= len(messages) and all(map(_same, earlier, messages))


def _same(message: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two messages say the same. Clients leave fields out that are empty, and some write the arguments of a
    call anew when they send it back."""
    names = {name for name in (*message, *other) if name in ("role", "content", "tool_call_id")}
    if any((message.get(name) or None) != (other.get(name) or None) for name in names):
        return False
    return _calls(message) == _calls(other)


def _calls(message: dict[str, Any]) -> list[Any]:
    """Return id, name and arguments of a message's calls of tools."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments: Any = function.get("arguments")
        with contextlib.suppress(ValueError, TypeError):  # what is no JSON is compared as it is
            arguments = json.loads(arguments)
        calls.append((call.get("id"), function.get("name"), arguments))
    return calls


# -- listening to httpx --------------------------------------------------------------------------------------------


_MODULES = ("httpx", "httpx2")
"""Newer versions of OpenAI's client bring a copy of httpx under the name httpx2."""


@functools.cache
def _listen() -> None:
    """Patch httpx so that every client of this process adds its answers to the current trajectory.

    Done at the first use, not at import. A module that is installed is imported: the coroutine may import it later."""
    for name in _MODULES:
        with contextlib.suppress(ImportError):
            _listen_to(importlib.import_module(name))


def _listen_to(module: Any) -> None:
    """Replace `send` of both clients of `module` (httpx or httpx2) with one that adds each chat completion to the
    current trajectory."""
    send_original, send_async_original = module.Client.send, module.AsyncClient.send
    # httpx accepts only streams of its own classes, and each module has its own.
    tee = type("Tee", (_Tee, module.SyncByteStream), {})
    async_tee = type("AsyncTee", (_AsyncTee, module.AsyncByteStream), {})

    def capture_end(trajectory: Trajectory, request_body: dict[str, Any], encoding: str, body: bytes) -> None:
        """Add what a stream brought, which may be compressed."""
        try:
            decoded = module.Response(200, headers={"content-encoding": encoding}, content=body).content
        except module.DecodingError:
            return  # it was cut off
        _add_answer(trajectory, request_body, decoded)

    def capture(response: Any, request: Any, tee_class: Any) -> Any:
        trajectory = _current.get()
        if trajectory is None or not request.url.path.endswith(_PATH) or response.status_code != 200:
            return response
        try:
            request_body = json.loads(request.content)
        except (module.RequestNotRead, ValueError):
            return response  # its body was streamed or is no JSON, so it is no chat completion
        if response.is_closed:
            _add_answer(trajectory, request_body, response.content)
        else:
            encoding = response.headers.get("content-encoding", "")
            response.stream = tee_class(
                response.stream, functools.partial(capture_end, trajectory, request_body, encoding)
            )
        return response

    @functools.wraps(send_original)
    def send(self: Any, request: Any, **options: Any) -> Any:
        return capture(send_original(self, request, **options), request, tee)

    @functools.wraps(send_async_original)
    async def send_async(self: Any, request: Any, **options: Any) -> Any:
        return capture(await send_async_original(self, request, **options), request, async_tee)

    module.Client.send, module.AsyncClient.send = send, send_async


def _add_answer(trajectory: Trajectory, request_body: dict[str, Any], body: bytes) -> None:
    """Add the call and its answer in `body`, a JSON document or server-sent events."""
    events = any(line.startswith(b"data:") for line in body.split(b"\n"))  # comments may come first
    reply = read_stream(body) if events else _read(body)
    if reply is not None and reply.choices:
        _add(trajectory, request_body, reply)


def _read(body: bytes) -> ChatCompletion | None:
    try:
        return ChatCompletion.model_validate_json(body)
    except ValueError:
        return None  # no chat completion, or an answer that was cut off


def read_stream(body: bytes) -> ChatCompletion | None:
    """Return the chat completion that the chunks of a stream make up, or `None` if it was cut off."""
    streamed = StreamedCompletion()
    for line in body.split(b"\n"):
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or not data or data == b"[DONE]":
            continue
        try:
            streamed.add(ChatCompletionChunk.model_validate_json(data))
        except ValueError:
            return None
    return streamed.completion() if streamed.finished else None


class _Copy:
    """Passes a stream on, and hands its content to `at_end` when it is closed."""

    def __init__(self, stream: Any, at_end: Callable[[bytes], None]) -> None:
        self._stream, self._at_end = stream, at_end
        self._parts: list[bytes] = []

    def _end(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            self._at_end(b"".join(parts))


class _Tee(_Copy):
    """Of a blocking client."""

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._parts.append(part)
            yield part

    def close(self) -> None:
        self._end()
        self._stream.close()


class _AsyncTee(_Copy):
    """Of an asynchronous client."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._parts.append(part)
            yield part

    async def aclose(self) -> None:
        self._end()
        await self._stream.aclose()
