"""Passes accepted connections from the owner of the port to the worker that has the fewest open ones.

The owner accepts and sends each socket through a `SOCK_SEQPACKET` pair (`SCM_RIGHTS`). Clients keep their connections,
so this happens once for many calls, and every worker holds the same number of connections, give or take one. The
kernel's own ways do not balance kept connections (docs/decisions/0055): `SO_REUSEPORT` picks by a hash, and with a
shared listening socket the worker that wakes first takes all that wait.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable

from pipeline.telemetry.logs import get_logger

log = get_logger("rollout_gateway.workers.handover")

_AT_ONCE = 64
"""Connections that are accepted or received before other work gets a turn."""
_AGAIN_S = 0.05
"""Pause after which connections that no worker could take are offered again."""
_COUNT = struct.Struct("<I")


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the owner's and the worker's end of a channel for connections."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Lane:
    """The owner's side of the channel to one worker."""

    def __init__(self, channel: socket.socket, far: socket.socket) -> None:
        """`channel`: the owner's end. `far`: the worker's end, which the owner keeps too, so that it can take back
        what the worker does not receive."""
        channel.setblocking(False)
        self.channel, self._far = channel, far
        self.open = 0
        """Connections that the worker was given and has not reported as closed."""
        self.turn = 0
        """When it was given its last connection, in connections of all workers."""

    def hand_over(self, connection: socket.socket) -> bool:
        """Send a connection to the worker. Returns whether the channel took it."""
        try:
            socket.send_fds(self.channel, [b"c"], [connection.fileno()])
        except OSError:  # the channel is full
            return False
        self.open += 1
        return True

    def take_back(self) -> list[socket.socket]:
        """Return the connections that the worker has not received, oldest first."""
        taken: list[socket.socket] = []
        while True:
            try:
                _, handles, _, _ = socket.recv_fds(self._far, 1, 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return taken
            if not handles:
                return taken
            taken.append(socket.socket(fileno=handles[0]))
            self.open -= 1

    def close(self) -> None:
        self.channel.close()
        self._far.close()

    def read_closed(self) -> None:
        """Read how many connections the worker has closed."""
        try:
            while data := self.channel.recv(_COUNT.size):
                self.open -= _COUNT.unpack(data)[0]
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("a worker's channel broke", error=str(error))
        asyncio.get_running_loop().remove_reader(self.channel)


class Distributor:
    """Accepts connections on the port and gives each to the worker with the fewest."""

    def __init__(self, listener: socket.socket) -> None:
        """`listener` must not block."""
        self._listener = listener
        self._lanes: list[Lane] = []
        self._waiting: deque[socket.socket] = deque()
        """Accepted connections that no worker could take yet."""
        self._turns = 0
        self._accepting = False
        self._again: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._offer_again()

    def close(self) -> None:
        """Accept no more. Connections that wait for a worker are closed."""
        self._pause()
        if self._again is not None:
            self._again.cancel()
        while self._waiting:
            self._waiting.popleft().close()

    def add(self, lane: Lane) -> None:
        """Give connections to a worker that is ready."""
        self._lanes.append(lane)
        self._loop.add_reader(lane.channel, lane.read_closed)
        self._offer_again()

    def remove(self, lane: Lane) -> None:
        """Stop giving connections to a worker. Those that it has not received go to others. `add` may follow."""
        if lane in self._lanes:
            self._lanes.remove(lane)
            self._loop.remove_reader(lane.channel)
            self._waiting.extend(lane.take_back())
            self._offer_again()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # such as too many open files
                log.error("no connection could be accepted", error=str(error))
                self._offer_later()
                return
            if not self._give(connection):
                self._waiting.append(connection)
                self._offer_later()
                return

    def _give(self, connection: socket.socket) -> bool:
        for lane in sorted(self._lanes, key=lambda lane: (lane.open, lane.turn)):
            if lane.hand_over(connection):
                self._turns += 1
                lane.turn = self._turns
                connection.close()
                return True
        return False

    def _offer_again(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        while self._waiting:
            if not self._give(self._waiting[0]):
                self._offer_later()
                return
            self._waiting.popleft()
        if not self._accepting and self._lanes:
            self._accepting = True
            self._loop.add_reader(self._listener, self._accept)

    def _offer_later(self) -> None:
        """Leave further connections in the port's queue for a moment."""
        self._pause()
        if self._lanes:  # else `add` offers them
            self._again = self._loop.call_later(_AGAIN_S, self._offer_again)

    def _pause(self) -> None:
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listener)


class Receiver:
    """The worker's end of its channel: a source of connections for `http.server.run_server`."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._closed = 0
        """Connections that ended and are not reported yet."""
        self._reporting = False
        self._starting: set[asyncio.Task[None]] = set()

    async def start(self, factory: Callable[[], asyncio.Protocol]) -> None:
        """Make a protocol for each connection that comes."""
        self._loop, self._factory = asyncio.get_running_loop(), factory
        self._loop.add_reader(self._channel, self._receive)

    def close(self) -> None:
        """Take no further connections. It may be called again."""
        if self._channel.fileno() < 0:
            return
        self._loop.remove_reader(self._channel)
        self._channel.close()

    def connection_closed(self) -> None:
        """Tell the owner that a connection has ended."""
        self._closed += 1
        if not self._reporting:
            self._reporting = True
            self._loop.call_soon(self._report)

    def _report(self) -> None:
        self._reporting = False
        try:
            self._channel.send(_COUNT.pack(self._closed))
        except BlockingIOError:
            self._reporting = True
            self._loop.call_later(_AGAIN_S, self._report)
            return
        except OSError:  # the worker or its owner ends
            pass
        self._closed = 0

    def _receive(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                _, handles, _, _ = socket.recv_fds(self._channel, 1, 1)
            except BlockingIOError:
                return
            except OSError as error:
                log.error("a connection could not be received", error=str(error))
                return
            if not handles:  # the owner has ended
                self._loop.remove_reader(self._channel)
                return
            connection = socket.socket(fileno=handles[0])
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._begin(connection))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _begin(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._factory, connection)
        except OSError as error:  # the client has left already
            log.info("a connection ended before it began", error=str(error))
            connection.close()
            self.connection_closed()
