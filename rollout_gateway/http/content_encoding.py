"""Bodies that a client sends compressed."""

from __future__ import annotations

import zlib

import anyio.to_thread

from rollout_gateway.http.errors import ApiError

_IN_THREAD = 16384
"""Bytes of a compressed body beyond which it is unpacked in a thread."""
_WINDOWS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}


async def decode_body(body: bytes, coding: bytes, limit: int) -> bytes:
    """`body` without its `Content-Encoding`.

    Raises a 415 `ApiError` for a coding that is not taken here, a 413 one for more than `limit` bytes, a 400 one for what
    is not in that coding."""
    name = coding.strip().lower()
    if name in (b"", b"identity"):
        return body
    if name not in _WINDOWS:
        raise ApiError(
            415,
            f"Bodies in the coding {name.decode('latin-1')!r} are not taken here: send gzip, deflate, or none.",
            code="unsupported_encoding",
            headers=((b"accept-encoding", b"gzip, deflate"),),
        )
    if len(body) > _IN_THREAD:
        return await anyio.to_thread.run_sync(_unpacked, body, name, limit)
    return _unpacked(body, name, limit)


def _unpacked(body: bytes, name: bytes, limit: int) -> bytes:
    try:
        return _inflated(body, _WINDOWS[name], limit)
    except zlib.error as error:
        if name == b"deflate":  # some clients leave zlib's frame out
            try:
                return _inflated(body, -15, limit)
            except zlib.error:
                pass
        raise ApiError(
            400, f"The body is not in the coding {name.decode()!r} that its header names: {error}.", code="invalid_encoding"
        ) from error  # fmt: skip


def _inflated(body: bytes, window: int, limit: int) -> bytes:
    unpacker = zlib.decompressobj(window)
    out = unpacker.decompress(body, limit + 1)
    if len(out) > limit:
        raise ApiError(413, "The unpacked body is larger than this gateway takes.", code="body_too_large")
    if not unpacker.eof:
        raise zlib.error("it ends too early")
    return out
