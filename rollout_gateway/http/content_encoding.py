"""Compressed request bodies."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import anyio.to_thread

from rollout_gateway.http.errors import ApiError

_IN_THREAD = 16384
"""Bytes of a compressed body beyond which it is decompressed in a thread."""
_PIECE = 4 * 1024 * 1024
"""Bytes that are decompressed before they are counted."""
_WINDOW_BITS = {b"gzip": (31,), b"x-gzip": (31,), b"deflate": (15, -15)}
"""zlib's window bits to try, in order. Some clients send `deflate` without zlib's header."""


async def decode_body(body: bytes, encoding: bytes, limit: int, count: Callable[[int], None]) -> bytes:
    """Decompress `body`. `encoding` is the value of its `Content-Encoding` header. `count` is called with the size of
    each piece that was decompressed.

    Raises a 415 `ApiError` for an unsupported encoding, a 413 one if the result is larger than `limit` bytes, and a
    400 one if the body does not have that encoding; and what `count` raises."""
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
    reason = ""
    for window_bits in _WINDOW_BITS[name]:
        decompressor = zlib.decompressobj(window_bits)
        pieces, size, rest = [], 0, body
        try:
            while not decompressor.eof:
                args = rest, min(_PIECE, limit + 1 - size)
                if len(body) > _IN_THREAD:
                    piece = await anyio.to_thread.run_sync(decompressor.decompress, *args)
                else:
                    piece = decompressor.decompress(*args)
                if not piece and not decompressor.eof:
                    reason = reason or "it ends too early"
                    break
                size += len(piece)
                if size > limit:
                    message = f"The decompressed body is larger than {limit} bytes."
                    raise ApiError(413, "body_too_large", message)
                count(len(piece))
                pieces.append(piece)
                rest = decompressor.unconsumed_tail
            else:
                return b"".join(pieces)
        except zlib.error as error:
            reason = reason or str(error)
    raise ApiError(400, "invalid_encoding", f"The body is not valid {name.decode()}: {reason}.")
