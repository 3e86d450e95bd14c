"""Whether a client that ended its side of a connection still listens (docs/decisions/0008).

One that half-closed and one that left look the same: both send a FIN. The difference shows once something is sent to it: one
that left answers with a reset.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout_gateway.http.connection import Connection

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""An interim response: clients of HTTP/1.1 have to skip those that they did not ask for."""
_FIRST_S = 0.02
"""How long a client is answered without a look at whether it still listens: most answers of the control API are done."""
_LONGEST_S = 0.5
_KEEPALIVE = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 2))


def watch(connection: Connection) -> None:
    """Abort the half-closed `connection` once its client turns out to have left."""
    peer: socket.socket = connection.transport.get_extra_info("socket")
    # Where nothing can be sent (a stream between two events, HTTP/1.0), the kernel finds out whether anyone is there.
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    connection.loop.call_later(_FIRST_S, _look, connection, peer, _FIRST_S / 2, False)


def _look(connection: Connection, peer: socket.socket, pause_s: float, asked: bool) -> None:
    if connection.transport.is_closing():
        return
    if peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        connection.transport.abort()
        return
    active = connection.active
    if not asked and active is not None and not active.started and not active.plain:
        connection.transport.write(CONTINUE)
        asked = True
    connection.loop.call_later(pause_s, _look, connection, peer, min(pause_s * 2, _LONGEST_S), asked)
