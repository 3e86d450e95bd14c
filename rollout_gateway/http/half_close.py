"""Whether a client that ended its side of a connection still waits for its answer (docs/decisions/0008).

A client that half-closed and one that left look the same: both sent a FIN. They differ once something is sent to
them: a client that left answers with a reset."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""An interim response. HTTP/1.1 clients have to skip those that they did not ask for."""
_FIRST_S = 0.02
"""How long a client is answered before the first check. Most answers of the control API take less."""
_LONGEST_S = 0.5
_KEEPALIVE = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 2))


def watch(transport: asyncio.Transport, may_send: Callable[[], bool]) -> None:
    """Abort a half-closed connection once its client turns out to have left. `may_send` says whether an interim
    response may be sent, which is so before the answer of an HTTP/1.1 request has begun."""
    loop = asyncio.get_running_loop()
    peer: socket.socket = transport.get_extra_info("socket")
    # If nothing may be sent (between two events of a stream, or in HTTP/1.0), TCP's keep-alive detects the reset.
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def check(pause_s: float, sent: bool) -> None:
        if transport.is_closing():
            return
        if peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            transport.abort()
            return
        if not sent and may_send():
            transport.write(CONTINUE)
            sent = True
        loop.call_later(pause_s, check, min(pause_s * 2, _LONGEST_S), sent)

    loop.call_later(_FIRST_S, check, _FIRST_S / 2, False)
