"""Calls that are listened to, whatever brings them: compressed streams, and a client that is imported late."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zlib
from collections.abc import Callable

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
    cut_off = await art.capture_auto_trajectory(stream(compress(STREAM)[:-40]))
    assert cut_off.messages() == []


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
