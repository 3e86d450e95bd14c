"""Calls that are listened to, whatever brings them: compressed streams, and a client that is imported late."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import pytest

import journeywork.art as art

pytestmark = pytest.mark.anyio

URL = "http://model/v1/chat/completions"
TOP = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
CHOICES = [
    {"index": 0, "delta": {"role": "assistant", "content": "hel"}},
    {"index": 0, "delta": {"content": "lo"}},
    {"index": 0, "delta": {}, "finish_reason": "stop"},
]
STREAM = (
    "".join(f"data: {json.dumps({**TOP, 'choices': [c]})}\n\n" for c in CHOICES).encode()
    + b"data: [DONE]\n\n"
)
BODY = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("encoding", "compress"), [("", bytes), ("gzip", gzip.compress), ("deflate", zlib.compress)]
)
async def test_a_compressed_stream_is_captured(encoding: str, compress: Callable[[bytes], bytes]) -> None:
    async def stream(body: bytes) -> None:
        headers = {"content-encoding": encoding} if encoding else {}

        def answer(_: httpx.Request) -> httpx.Response:
            return httpx.Response(200, headers=headers, stream=httpx.ByteStream(body))

        transport = httpx.MockTransport(answer)
        async with (
            httpx.AsyncClient(transport=transport) as client,
            client.stream("POST", URL, json=BODY) as reply,
        ):
            async for _ in reply.aiter_raw():
                pass

    made = await art.capture_auto_trajectory(stream(compress(STREAM)))
    assert [m.get("content") for m in made.messages()] == ["a", "hello"]  # type: ignore[union-attr]
    commented = await art.capture_auto_trajectory(stream(compress(b": keep-alive\n\n" + STREAM)))
    assert commented.messages() == made.messages()  # type: ignore[union-attr]
    cut_off = await art.capture_auto_trajectory(stream(compress(STREAM)[:-40]))
    assert cut_off.messages() == []


async def test_a_call_whose_arguments_a_client_wrote_anew_continues_the_conversation() -> None:
    """As LangChain does, which reads them and writes them with spaces and escapes of its own."""
    said = iter(('{"q":"é",\n"n":1}', '{"q": 2}'))

    def call(arguments: str) -> dict[str, Any]:
        return {"id": "c", "type": "function", "function": {"name": "find", "arguments": arguments}}

    def answer(_: httpx.Request) -> httpx.Response:
        message = {"role": "assistant", "content": None, "tool_calls": [call(next(said))]}
        choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
        return httpx.Response(200, json={**TOP, "object": "chat.completion", "choices": [choice]})

    async def work() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            chat: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
            await client.post(URL, json={"model": "m", "messages": chat})
            again = call(json.dumps({"n": 1, "q": "é"}))
            chat += [
                {"role": "assistant", "tool_calls": [again]},
                {"role": "tool", "tool_call_id": "c", "content": "x"},
            ]
            await client.post(URL, json={"model": "m", "messages": chat})

    made = await art.capture_auto_trajectory(work())
    assert [m["role"] for m in made.messages()] == ["user", "assistant", "tool", "assistant"]
    assert made.additional_histories == []


PROGRAM = """
import asyncio, sys
import journeywork.art as art

async def nothing(): pass

async def work():
    import httpx2
    def answer(request):
        message = {"role": "assistant", "content": "b"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        top = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
        return httpx2.Response(200, json={**top, "choices": [choice]})
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
        await client.post("http://model/v1/chat/completions", json=body)

for name in [name for name in sys.modules if name.partition(".")[0] == "httpx2"]:
    del sys.modules[name]
asyncio.run(art.capture_auto_trajectory(nothing()))
print(len(asyncio.run(art.capture_auto_trajectory(work())).messages()))
"""


def test_a_client_that_is_imported_after_the_first_capture_is_listened_to() -> None:
    """In a process of its own, because here httpx2 may be imported already."""
    pytest.importorskip("httpx2")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("2\n", "")
