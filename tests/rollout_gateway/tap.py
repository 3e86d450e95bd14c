"""A proxy between gateway and vLLM that passes all bytes on unchanged and keeps vLLM's replies for comparison."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

_CALLS = ("/v1/chat/completions", "/v1/completions")


@dataclass(eq=False)
class Call:
    """A request to vLLM and its reply, as they were on the wire."""

    path: str
    request: dict[str, Any]
    status: int = 0
    body: bytes = b""
    whole: bool = False
    """The reply came to its end."""

    @property
    def streamed(self) -> bool:
        return bool(self.request.get("stream"))

    def _replies(self) -> list[dict[str, Any]]:
        if not self.streamed:
            return [json.loads(self.body)]
        events = [e[6:] for e in self.body.split(b"\n\n") if e.startswith(b"data: ")]
        return [json.loads(e) for e in events if e != b"[DONE]"]

    @property
    def models(self) -> set[str]:
        """What vLLM says it answered with."""
        return {r["model"] for r in self._replies() if "model" in r}

    @property
    def prompt_ids(self) -> list[int]:
        return next((r["prompt_token_ids"] for r in self._replies() if r.get("prompt_token_ids")), [])

    def sampled(self, choice: int = 0) -> tuple[list[int], list[float]]:
        """Token ids and logprobs of a choice of a chat completion."""
        ids: list[int] = []
        logprobs: list[float] = []
        for reply in self._replies():
            for said in reply.get("choices", ()):
                if said["index"] == choice:
                    ids += said.get("token_ids") or ()
                    entries = (said.get("logprobs") or {}).get("content") or ()
                    logprobs += [entry["logprob"] for entry in entries]
        return ids, logprobs


@dataclass(eq=False)
class _Side:
    """Parses one direction of a connection: httptools calls back into it."""

    url: bytes = b""
    parts: list[bytes] = field(default_factory=list)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)

    def take(self) -> bytes:
        body = b"".join(self.parts)
        self.parts, self.url = [], b""
        return body


class _Requests(_Side):
    def __init__(self, waiting: deque[Call], calls: list[Call]) -> None:
        super().__init__()
        self.waiting, self.calls = waiting, calls

    def on_message_complete(self) -> None:
        path, body = self.url.decode(), self.take()
        is_call = path in _CALLS
        call = Call(path, json.loads(body) if is_call else {})
        self.waiting.append(call)
        if is_call:
            self.calls.append(call)


class _Replies(_Side):
    def __init__(self, waiting: deque[Call]) -> None:
        super().__init__()
        self.waiting = waiting
        self.parser = httptools.HttpResponseParser(self)

    def on_body(self, data: bytes) -> None:
        self.waiting[0].body += data

    def on_headers_complete(self) -> None:
        self.waiting[0].status = self.parser.get_status_code()

    def on_message_complete(self) -> None:
        self.waiting.popleft().whole = True


class Tap:
    """Listens on `url`, in a thread of its own, and passes on to `upstream`. Use as `with tapped(url) as tap`."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self.calls: list[Call] = []
        """Model calls, in the order in which they were sent."""
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(60)

    def _run(self, started: threading.Event) -> None:
        async def serve() -> None:
            server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._stopping = asyncio.Event()
            started.set()
            async with server:
                await self._stopping.wait()
                for task in list(self._tasks):
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

        self._loop.run_until_complete(serve())
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        waiting: deque[Call] = deque()
        try:
            there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
            try:
                to = asyncio.ensure_future(
                    _pass_on(
                        reader, there_writer, httptools.HttpRequestParser(_Requests(waiting, self.calls))
                    )
                )
                back = asyncio.ensure_future(_pass_on(there_reader, writer, _Replies(waiting).parser))
                # Either side's end is the connection's end, as it would be without a tap.
                await asyncio.wait((to, back), return_when=asyncio.FIRST_COMPLETED)
                for passing in (to, back):
                    passing.cancel()
                await asyncio.gather(to, back, return_exceptions=True)
            finally:
                there_writer.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(60)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, parser: Any) -> None:
    # Seen before it is passed on: a test that has the end of a reply finds the call complete in `calls`.
    while data := await reader.read(65536):
        parser.feed_data(data)
        writer.write(data)
        await writer.drain()


@contextlib.contextmanager
def tapped(upstream: str) -> Iterator[Tap]:
    tap = Tap(upstream)
    tap.start()
    try:
        yield tap
    finally:
        tap.stop()
