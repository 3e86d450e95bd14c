"""Compressed bodies."""

from __future__ import annotations

import gzip
import zlib

import pytest

from rollout_gateway.http.content_encoding import decode_body
from rollout_gateway.http.errors import ApiError

pytestmark = pytest.mark.anyio


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
        assert await decode_body(data, encoding, size) == body


async def test_what_is_not_encoded_so_is_refused() -> None:
    packed = gzip.compress(b"x" * 1000)
    for data, encoding, status in (
        (b"x", b"gzip", 400),
        (packed[:-9], b"gzip", 400),
        (packed, b"deflate", 400),
        (b"", b"br", 415),
    ):
        with pytest.raises(ApiError) as refused:
            await decode_body(data, encoding, 1000)
        assert refused.value.status == status


async def test_a_small_body_that_unpacks_to_a_large_one_is_refused() -> None:
    bomb = gzip.compress(b"\0" * 10_000_000)
    assert len(await decode_body(bomb, b"gzip", 10_000_000)) == 10_000_000
    with pytest.raises(ApiError, match="larger"):
        await decode_body(bomb, b"gzip", 9_999_999)
