"""Compressed request bodies."""

from __future__ import annotations

import zlib

import anyio.to_thread

from rollout_gateway.http.errors import ApiError

_IN_THREAD = 16384
"""Bytes of a compressed body beyond which it is decompressed in a thread."""
_WINDOW_BITS = {b"gzip": (31,), b"x-gzip": (31,), b"deflate": (15, -15)}
"""zlib's window bits to try, in order. Some clients send `deflate` without zlib's header."""


async def decode_body(body: bytes, encoding: bytes, limit: int) -> bytes:
    """Decompress `body`. `encoding` is the value of its `Content-Encoding` header.

    Raises a 415 `ApiError` for an unsupported encoding, a 413 one if the result is larger than `limit` bytes, and a
    400 one if the body does not have that encoding."""
    name = encoding.strip().lower()
    if name in (b"", b"identity"):
        return body
    if name not in _WINDOW_BITS:
        raise ApiError(
            415,
            "unsupported_encoding",
            f"The Content-Encoding {name.decode('latin-1')!r} is not supported: send gzip, deflate, or none.",
            headers=((b"accept-encoding", b"gzip, deflate"),),
        )
    if len(body) > _IN_THREAD:
        return await anyio.to_thread.run_sync(_decompress, body, name, limit)
    return _decompress(body, name, limit)


def _decompress(body: bytes, name: bytes, limit: int) -> bytes:
    reason = ""
    for window_bits in _WINDOW_BITS[name]:
        try:
            decompressor = zlib.decompressobj(window_bits)
            out = decompressor.decompress(body, limit + 1)
        except zlib.error as error:
            reason = reason or str(error)
            continue
        if len(out) > limit:
            raise ApiError(413, "body_too_large", f"The decompressed body is larger than {limit} bytes.")
        if decompressor.eof:
            return out
        reason = reason or "it ends too early"
    raise ApiError(400, "invalid_encoding", f"The body is not valid {name.decode()}: {reason}.")
