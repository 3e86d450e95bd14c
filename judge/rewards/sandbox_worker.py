"""The process side of `judge.rewards.sandbox`: a script that imports the standard library only.

There are three kinds of process, from trusted to untrusted:

- The supervisor (this script's own process) reads requests from the judge and writes the answers. It never runs user
  code. In a sandbox it is process 1 of its own PID namespace, so that no process there can signal it, and all of them
  end with it.
- The fork server is a fork of the supervisor that imports the function's module once.
- A call is a fork of the fork server, one for each trajectory, with a socket of its own for one request and answer.

A trajectory that takes over its call has no channel on which it could answer for another one. After each answer every
process except supervisor and fork server is killed, so that nothing is left for the next trajectory.

Argument: JSON with the fields of `Settings`. Then on stdin, for each call: a line with the call's number and a line
with the trajectory as JSON. On stdout, one JSON line each: first `{"n": 0, "answer": "{}"}` once the function is
imported, then `{"n": <number>, "answer": "{\\"reward\\": 0.5}", "printed": "…"}`. An answer holds `reward` or
`error`. `"last": true` says that the process must be replaced.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_MAX_ANSWER = 1 << 20
_MAX_PRINTED = 4096
_MAX_HANDLES = 200
"""Processes that are ended at once. Each takes a file descriptor until it has ended."""
_READY_S = 5.0
"""How long the fork server may take to reap its call."""
_CHECK_MS = 25
"""Interval of the checks of memory and number of processes."""


class Settings(NamedTuple):
    """The judge's settings for the function."""

    entry: str
    path: list[str]
    """`sys.path` of the function."""
    memory_mb: int
    processes: int
    timeout_s: float
    start_s: float
    sandboxed: bool
    """This process is process 1 of a sandbox."""


class _ClosedError(Exception):
    """The judge has closed the worker's input."""


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# -- the processes that run user code ----------------------------------------------------------------------------


def _limit(settings: Settings) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (settings.memory_mb << 20,) * 2)
    if settings.sandboxed:
        # No memory behind file descriptors (memfd): no other limit counts it.
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        if tuple(int(n) for n in os.uname().release.split("-")[0].split(".")[:2]) >= (5, 14):
            # Before Linux 5.14 the limit counts all of the user's processes, not only those of this namespace.
            resource.setrlimit(resource.RLIMIT_NPROC, (settings.processes, settings.processes))


def _run_fork_server(settings: Settings, control: socket.socket, printed: int) -> NoReturn:
    """Import the function, report that on `control`, then fork a call for every socket received there."""
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (printed, 1), (printed, 2)):
        os.dup2(source, target)
    kept = control.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, 1 << 16)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _limit(settings)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_DUMPABLE, 1)  # libraries read /proc/self while they are imported
    sys.path[:] = settings.path
    module, _, name = settings.entry.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except BaseException as error:  # noqa: BLE001 - whatever user code raises is an answer
        control.send(_error(f"{type(error).__name__}: {error}"[:2000]).encode())
        os._exit(1)
    # From here on a call can neither trace the fork server nor open its descriptors, although it has the same user.
    _prctl(_PR_SET_DUMPABLE, 0)
    control.send(b"{}")
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            os._exit(0)
        if (child := os.fork()) == 0:
            control.close()
            _prctl(_PR_SET_DUMPABLE, 1)
            _call(function, fds[0])
        os.close(fds[0])
        os.waitpid(child, 0)
        control.send(b"ready")


def _call(function: Any, fd: int) -> NoReturn:
    with socket.socket(fileno=fd) as channel:
        try:
            with channel.makefile("rb") as request:
                trajectory = json.loads(request.read())
            answer = json.dumps({"reward": function(trajectory)})
        except BaseException as error:  # noqa: BLE001 - as above, `SystemExit` included
            answer = _error(f"{type(error).__name__}: {error}"[:2000])
        with suppress(BaseException):
            sys.stdout.flush()
        channel.sendall(answer.encode() + b"\n")
    os._exit(0)


# -- the supervisor --------------------------------------------------------------------------------------------------


class _Supervisor:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._requests = b""
        self._printed, write_end = os.pipe()
        os.set_blocking(self._printed, False)
        self._said = b""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server = os.fork()
        if self._server == 0:
            _run_fork_server(settings, theirs, write_end)
        theirs.close()
        os.close(write_end)

    def _line(self) -> bytes:
        while b"\n" not in self._requests:
            self._read_requests()
        line, _, self._requests = self._requests.partition(b"\n")
        return line

    def _read_requests(self) -> None:  # raises `_ClosedError` once the judge has closed its end of the pipe
        if not (read := os.read(0, 1 << 20)):
            raise _ClosedError
        self._requests += read

    def _answer(self, n: int, answer: str, last: bool) -> None:
        printed, self._said = self._said.decode("utf-8", "replace"), b""
        frame = json.dumps({"n": n, "answer": answer, "printed": printed, "last": last}).encode() + b"\n"
        while frame:
            frame = frame[os.write(1, frame) :]

    def run(self) -> None:
        """Answer until the judge closes the input or the fork server is gone."""
        try:
            self._answer(0, self._start(), not self._server)
            while self._server:
                n, trajectory = int(self._line()), self._line()
                self._answer(n, self._ask(trajectory), not self._server)
        except (_ClosedError, BrokenPipeError):
            pass  # the judge has closed the worker
        finally:
            self._kill_all(keep_server=False)

    def _start(self) -> str:
        poll = self._poll(self._control)
        why = self._watch(poll, self._settings.start_s, self._control.fileno(), "did not start")
        if not why:
            said = self._control.recv(1 << 16).decode("utf-8", "replace")
            why = "" if said == "{}" else said or _error("ended its process while it was imported")
        self._kill_all(keep_server=not why)
        return why or "{}"

    def _ask(self, trajectory: bytes) -> str:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                try:
                    socket.send_fds(self._control, [b"c"], [theirs.fileno()])
                except OSError:
                    self._kill_all(keep_server=False)
                    return _error("ended its process")
            answer = self._converse(ours, trajectory)
        self._kill_all(keep_server=True)
        if self._server and not self._server_is_ready():
            self._kill_all(keep_server=False)
        return answer

    def _converse(self, channel: socket.socket, trajectory: bytes) -> str:
        channel.setblocking(False)
        unsent, got = memoryview(trajectory), bytearray()
        poll = self._poll(channel)
        poll.modify(channel, select.POLLIN | select.POLLOUT)
        deadline = time.monotonic() + self._settings.timeout_s
        while b"\n" not in got:
            late = f"took longer than {self._settings.timeout_s} s"
            if why := self._watch(poll, deadline - time.monotonic(), channel.fileno(), late):
                return why
            with suppress(BlockingIOError, ConnectionResetError, BrokenPipeError):
                if unsent:
                    unsent = unsent[channel.send(unsent) :]
                    if not unsent:
                        channel.shutdown(socket.SHUT_WR)
                        poll.modify(channel, select.POLLIN)
            try:
                read = channel.recv(1 << 16)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                read = b""
            got += read
            if not read or len(got) > _MAX_ANSWER:
                return _error("ended its process" if not read else "answered more than 1 MB")
        self._listen()
        return bytes(got.partition(b"\n")[0]).decode("utf-8", "replace")

    def _poll(self, channel: socket.socket) -> select.poll:
        poll = select.poll()
        for end in (channel, self._printed, 0):
            poll.register(end, select.POLLIN)
        return poll

    def _watch(self, poll: select.poll, seconds: float, fd: int, late: str) -> str:
        """Wait until `fd` is ready. Return an error if a limit of time, memory or processes is exceeded first."""
        deadline = time.monotonic() + seconds
        look = time.monotonic() + _CHECK_MS / 1000
        while True:
            ready = poll.poll(_CHECK_MS)
            for end, _ in ready:
                if end == self._printed:
                    self._listen()
                if end == 0 and not self._requests:
                    self._read_requests()
            if any(end == fd for end, _ in ready):
                return ""
            if (now := time.monotonic()) > deadline:
                return _error(late)
            if now >= look:
                if why := self._exceeded():
                    return _error(why)
                look = time.monotonic() + _CHECK_MS / 1000

    def _listen(self) -> None:
        """Read what the function printed, so that its pipe never fills, and keep the end of it."""
        with suppress(BlockingIOError):
            while read := os.read(self._printed, 1 << 16):
                self._said = (self._said + read)[-_MAX_PRINTED:]

    def _server_is_ready(self) -> bool:
        """Wait until the fork server has reaped its call. If the call killed it, it may look alive until then."""
        self._control.settimeout(_READY_S)
        try:
            return self._control.recv(16) == b"ready"
        except (TimeoutError, ConnectionResetError):
            return False

    def _descendants(self) -> list[int]:
        """Return all descendants of this process, also those that have ended but are not reaped yet."""
        if self._settings.sandboxed:
            names = os.listdir("/proc")  # noqa: PTH208 - quicker
            return [int(name) for name in names if name.isdigit() and name != "1"]
        found, todo = [], [os.getpid()]
        while todo:
            children = _children(todo.pop())
            found += children
            todo += children
        return found

    def _running(self) -> list[int]:
        """Return the descendants of this process that still run, the fork server included."""
        found = self._descendants()
        if len(found) > 2 * self._settings.processes:
            return found  # too many to check each of them
        return [pid for pid in found if _runs(pid)]

    def _exceeded(self) -> str:
        """Return which limit is exceeded now, or an empty string."""
        pids = self._running()
        if len(pids) > self._settings.processes:  # first, because the rest takes time for each of them
            return f"had more than {self._settings.processes} processes and threads"
        limit, held, threads = self._settings.memory_mb << 20, _shared_memory(self._settings), 0
        for pid in pids:
            held += _memory(pid)
            threads += _threads(pid)
        if held > limit:
            return f"held more than {self._settings.memory_mb} MB of memory in {len(pids)} processes"
        if threads > self._settings.processes:
            return f"had more than {self._settings.processes} processes and threads"
        return ""

    def _kill_all(self, *, keep_server: bool) -> None:
        """Kill every process of the function, and the fork server too unless it is kept."""
        if self._settings.sandboxed:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGSTOP)  # all at once, so that none can fork during the search
        ended, again = set[int](), not self._settings.sandboxed
        while True:
            found = {pid for pid in self._descendants() if not (keep_server and pid == self._server)}
            doomed = [pid for pid in found if _runs(pid)]
            if not doomed and not again:
                break
            # A process that ended during the search may have left children, which are then children of this one:
            # search again.
            again = not self._settings.sandboxed and not found <= ended
            ended |= found
            handles = []
            for pid in doomed[:_MAX_HANDLES]:
                with suppress(ProcessLookupError):
                    handles.append(os.pidfd_open(pid))
                    os.kill(pid, signal.SIGKILL)
            for handle in handles:
                select.select([handle], [], [])  # readable once the process has ended
                os.close(handle)
        if keep_server and self._settings.sandboxed:
            with suppress(ProcessLookupError):
                os.kill(self._server, signal.SIGCONT)
        # Segments of System V shared memory outlive their processes. Only the end of the namespace frees them.
        if not keep_server or not _runs(self._server) or _shared_memory(self._settings):
            self._server = 0


def _error(why: str) -> str:
    return json.dumps({"error": why})


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the third (the state) on; none if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def _runs(pid: int) -> bool:
    return bool(fields := _stat(pid)) and fields[0] != "Z"


def _threads(pid: int) -> int:
    return int(fields[17]) if (fields := _stat(pid)) else 0


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it may end at any time
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - quicker
            with suppress(FileNotFoundError, ProcessLookupError):
                children = Path(f"/proc/{pid}/task/{task}/children").read_text("ascii")
                found += [int(child) for child in children.split()]
    return found


def _memory(pid: int) -> int:
    """Return the bytes that a process holds, with its share of shared pages if the kernel tells that."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]) * resource.getpagesize()
    return 0


def _shared_memory(settings: Settings) -> int:
    """Return the bytes of System V shared memory segments in the sandbox."""
    if not settings.sandboxed:
        return 0
    with suppress(OSError):
        rows = Path("/proc/sysvipc/shm").read_text("ascii").splitlines()[1:]
        return sum(int(row.split()[3]) for row in rows)
    return 0


def main() -> None:
    """Answer until stdin ends."""
    settings = Settings(**json.loads(sys.argv[1]))
    # The function's processes have the same user. None of them may trace this one or open its descriptors.
    _prctl(_PR_SET_DUMPABLE, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not settings.sandboxed:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Processes whose parents are gone become children of this one, and the kernel reaps them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _Supervisor(settings).run()


if __name__ == "__main__":
    main()
