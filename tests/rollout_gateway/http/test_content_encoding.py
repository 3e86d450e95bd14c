"""Compressed bodies."""

from __future__ import annotations

import gzip
import zlib

import anyio
import httpx
import pytest

from rollout_gateway.http.content_encoding import decode_body
from rollout_gateway.http.errors import ApiError
from rollout_gateway.http.request import Request
from tests.rollout_gateway.http.kit import serve

pytestmark = pytest.mark.anyio


def uncounted(_: int) -> None:
    pass


@pytest.mark.parametrize("size", [10, 100_000])
async def test_gzip_and_both_kinds_of_deflate_are_decoded(size: int) -> None:
    body = bytes(number % 251 for number in range(size))
    packed = zlib.compress(body)
    for data, encoding in (
        (gzip.compress(body), b"gzip"),
        (packed, b"Deflate"),
        (packed[2:-4], b"deflate"),
        (body, b" "),
    ):
        assert await decode_body(data, encoding, size, uncounted) == body


async def test_what_is_not_encoded_so_is_refused() -> None:
    packed = gzip.compress(b"x" * 1000)
    for data, encoding, status in (
        (b"x", b"gzip", 400),
        (packed[:-9], b"gzip", 400),
        (packed, b"deflate", 400),
        (b"", b"br", 415),
    ):
        with pytest.raises(ApiError) as refused:
            await decode_body(data, encoding, 1000, uncounted)
        assert refused.value.status == status


async def test_a_small_body_that_unpacks_to_a_large_one_is_refused() -> None:
    bomb = gzip.compress(b"\0" * 10_000_000)
    assert len(await decode_body(bomb, b"gzip", 10_000_000, uncounted)) == 10_000_000
    with pytest.raises(ApiError, match="larger"):
        await decode_body(bomb, b"gzip", 9_999_999, uncounted)


async def test_decompressed_bodies_count_until_they_are_answered() -> None:
    """Small bodies that unpack to large ones take no more memory together than bodies that come as they are."""
    size, held, release = 10_000_000, anyio.Event(), anyio.Event()

    async def handle(request: Request) -> None:
        try:
            coding = request.headers[b"content-encoding"]
            body = await decode_body(request.body, coding, size, request.count_decompressed)
        except ApiError as error:
            request.answer(error.status, error.body())
            return
        if request.target == "/held":
            held.set()
            await release.wait()
        request.answer(200, b"%d" % len(body))

    bomb = gzip.compress(b"\0" * size)
    async with (
        serve(handle, max_body_bytes=size, max_buffered_bytes=15_000_000) as port,
        httpx.AsyncClient(headers={"content-encoding": "gzip"}, timeout=60) as client,
    ):
        url = f"http://127.0.0.1:{port}"

        async def hold() -> None:
            assert (await client.post(f"{url}/held", content=bomb)).status_code == 200

        async with anyio.create_task_group() as tg:
            tg.start_soon(hold)
            await held.wait()
            refused = await client.post(url, content=bomb)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_bodies")
            assert (await client.post(url, content=gzip.compress(b"x" * 1000))).text == "1000"
            release.set()
        for _ in range(3):
            assert (await client.post(url, content=bomb)).text == str(size)
