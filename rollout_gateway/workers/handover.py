"""Passes accepted connections from the owner of the port to the worker that has the fewest open ones.

The owner accepts a connection and sends its socket to a worker through a `SOCK_SEQPACKET` pair (`SCM_RIGHTS`). Clients
keep their connections open for many calls, so this costs little per call, and the workers' connection counts differ by
one at most. The kernel's mechanisms do not balance such connections (docs/decisions/0055-workers.md): `SO_REUSEPORT`
picks a worker by a hash, and with a shared listening socket the worker that wakes first accepts all that wait.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable

from pipeline.telemetry.logs import get_logger

log = get_logger("rollout_gateway.workers.handover")

_BATCH = 64
"""Connections that are accepted or received before the event loop does other work."""
_RETRY_S = 0.05
"""Pause before a connection that no worker could take is offered again."""
_COUNT = struct.Struct("<I")


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a channel for connections: the owner's and the worker's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class WorkerChannel:
    """The owner's side of the channel to one worker."""

    def __init__(self, end: socket.socket, far: socket.socket) -> None:
        """`end`: the owner's end. `far`: the worker's end. The owner keeps a copy of it to take back connections
        that the worker does not receive."""
        end.setblocking(False)
        self.end, self._far = end, far
        self.open = 0
        """Number of connections that the worker was given and has not reported as closed."""
        self.last_given = 0
        """Number, counted over all workers, of the last connection that this worker was given."""

    def send(self, connection: socket.socket) -> bool:
        """Send a connection to the worker. Returns false if the channel is full."""
        try:
            socket.send_fds(self.end, [b"c"], [connection.fileno()])
        except OSError:
            return False
        self.open += 1
        return True

    def take_back(self) -> list[socket.socket]:
        """Return the connections that the worker has not received, oldest first."""
        taken: list[socket.socket] = []
        while True:
            try:
                _, descriptors, _, _ = socket.recv_fds(self._far, 1, 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return taken
            if not descriptors:
                return taken
            taken.append(socket.socket(fileno=descriptors[0]))
            self.open -= 1

    def close(self) -> None:
        self.end.close()
        self._far.close()

    def read_closed(self) -> None:
        """Read the worker's reports of closed connections."""
        try:
            while data := self.end.recv(_COUNT.size):
                self.open -= _COUNT.unpack(data)[0]
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("the channel to a worker failed; it gets no more connections", error=str(error))
        asyncio.get_running_loop().remove_reader(self.end)


class Distributor:
    """Accepts connections on the port and gives each to the worker with the fewest."""

    def __init__(self, listener: socket.socket) -> None:
        """`listener`: the listening socket of the port, in non-blocking mode."""
        self._listener = listener
        self._channels: list[WorkerChannel] = []
        self._waiting: deque[socket.socket] = deque()
        """Accepted connections that no worker could take yet."""
        self._given = 0
        self._accepting = False
        self._retry: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._offer_waiting()

    def close(self) -> None:
        """Stop accepting, and close the connections that wait for a worker."""
        self._pause()
        if self._retry is not None:
            self._retry.cancel()
        while self._waiting:
            self._waiting.popleft().close()

    def add(self, channel: WorkerChannel) -> None:
        """Give connections to a worker that is ready."""
        self._channels.append(channel)
        self._loop.add_reader(channel.end, channel.read_closed)
        self._offer_waiting()

    def remove(self, channel: WorkerChannel) -> None:
        """Stop giving connections to a worker. Those that it has not received go to other workers. The worker may be
        added again."""
        if channel in self._channels:
            self._channels.remove(channel)
            self._loop.remove_reader(channel.end)
            self._waiting.extend(channel.take_back())
            self._offer_waiting()

    def _accept(self) -> None:
        for _ in range(_BATCH):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # such as too many open files
                log.error("connections can't be accepted; trying again", error=str(error))
                self._offer_later()
                return
            if not self._give(connection):
                self._waiting.append(connection)
                self._offer_later()
                return

    def _give(self, connection: socket.socket) -> bool:
        for channel in sorted(self._channels, key=lambda c: (c.open, c.last_given)):
            if channel.send(connection):
                self._given += 1
                channel.last_given = self._given
                connection.close()
                return True
        return False

    def _offer_waiting(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        while self._waiting:
            if not self._give(self._waiting[0]):
                self._offer_later()
                return
            self._waiting.popleft()
        if not self._accepting and self._channels:
            self._accepting = True
            self._loop.add_reader(self._listener, self._accept)

    def _offer_later(self) -> None:
        """Stop accepting for `_RETRY_S`. The kernel queues further connections."""
        self._pause()
        if self._channels:  # otherwise `add` continues
            self._retry = self._loop.call_later(_RETRY_S, self._offer_waiting)

    def _pause(self) -> None:
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listener)


class ConnectionReceiver:
    """The worker's end of its channel. `http.server.run_server` gets its connections from it."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._closed = 0
        """Number of connections that have ended and are not reported yet."""
        self._reporting = False
        self._starting: set[asyncio.Task[None]] = set()

    async def start(self, factory: Callable[[], asyncio.Protocol]) -> None:
        """Start receiving. For each connection, `factory` makes its protocol."""
        self._loop, self._factory = asyncio.get_running_loop(), factory
        self._loop.add_reader(self._channel, self._receive)

    def close(self) -> None:
        """Stop receiving. May be called again."""
        if self._channel.fileno() < 0:
            return
        self._loop.remove_reader(self._channel)
        self._channel.close()

    def connection_closed(self) -> None:
        """Report to the owner that a connection has ended."""
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
            self._loop.call_later(_RETRY_S, self._report)
            return
        except OSError:  # the channel is closed: this process or the owner is ending
            pass
        self._closed = 0

    def _receive(self) -> None:
        for _ in range(_BATCH):
            try:
                _, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
            except BlockingIOError:
                return
            except OSError as error:
                log.error("a connection from the port's owner could not be received", error=str(error))
                return
            if not descriptors:  # the owner has ended
                self._loop.remove_reader(self._channel)
                return
            connection = socket.socket(fileno=descriptors[0])
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._begin(connection))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _begin(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._factory, connection)
        except OSError as error:  # the client has closed it already
            log.info("the client closed a connection before it was served", error=str(error))
            connection.close()
            self.connection_closed()
