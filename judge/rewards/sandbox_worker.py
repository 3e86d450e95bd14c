"""The process side of `judge.rewards.sandbox`; run as a script, with the standard library alone.

Three kinds of process, from trusted to not trusted:

- The warden (this script's own process) reads requests from the judge and writes the answers. It never runs user code. In a
  sandbox it is process 1 of its own PID namespace, so nothing in there can signal it, and everything ends with it.
- The host is a fork of the warden that imports the function's module once.
- A call is a fork of the host, one for each trajectory. It gets a socket of its own for one request and one answer.

A call that is taken over by the trajectory it scores therefore holds nothing by which it could answer for another one. After
each answer every process but warden and host is killed, so nothing stays behind for the next trajectory.

Argument: JSON with the fields of `Settings`. Then on stdin, for each call: a line with the call's number and a line with the
trajectory as JSON. On stdout, one JSON line each: first `{"n": 0, "answer": "{}"}` once the function is imported, then
`{"n": <number>, "answer": "{\\"reward\\": 0.5}", "printed": "…"}`. An answer holds `reward` or `error`; `"last": true` says that
the process must be replaced.
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
_AT_ONCE = 200
"""Processes that are ended in one go; each takes a file descriptor until it has ended."""
_READY_S = 5.0
"""How long the host may take to see that its call has ended."""
_WATCH_MS = 25
"""Time between two looks at the memory and the number of the function's processes."""


class Settings(NamedTuple):
    """What the judge says about the function."""

    entry: str
    path: list[str]
    """`sys.path` of the function."""
    memory_mb: int
    processes: int
    timeout_s: float
    start_s: float
    jailed: bool
    """Whether this process is process 1 of a sandbox."""


class _EndError(Exception):
    """The judge closed its end."""


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# -- the processes that run user code ----------------------------------------------------------------------------


def _limit(settings: Settings) -> None:
    memory = settings.memory_mb << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    if settings.jailed:
        # No memory behind file descriptors (memfd), which no other limit sees.
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        if tuple(int(n) for n in os.uname().release.split("-")[0].split(".")[:2]) >= (5, 14):
            # Before Linux 5.14 the limit counts all of the user's processes, not only those of this namespace.
            resource.setrlimit(resource.RLIMIT_NPROC, (settings.processes, settings.processes))


def _host(settings: Settings, control: socket.socket, printed: int) -> NoReturn:
    """Import the function, say so on `control`, then fork a call for every socket that comes."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (printed, 1), (printed, 2)):
        os.dup2(source, target)
    kept = control.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, 1 << 16)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _limit(settings)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_DUMPABLE, 1)  # libraries look at /proc/self while they are imported
    sys.path[:] = settings.path
    module, _, name = settings.entry.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except BaseException as error:  # noqa: BLE001 - the edge between their code and ours
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}).encode())
        os._exit(1)
    # From here on a call, although of the same user, can neither trace the host nor open its descriptors.
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
        except BaseException as error:  # noqa: BLE001 - as above; `SystemExit` too is an answer
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]})
        with suppress(BaseException):
            sys.stdout.flush()
        channel.sendall(answer.encode() + b"\n")
    os._exit(0)


# -- the warden --------------------------------------------------------------------------------------------------


class _Warden:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._host = 0
        self._requests = b""
        self._printed, write_end = os.pipe()
        os.set_blocking(self._printed, False)
        self._said = b""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._host = os.fork()
        if self._host == 0:
            _host(settings, theirs, write_end)
        theirs.close()
        os.close(write_end)

    # -- the judge's side

    def _line(self) -> bytes:
        while b"\n" not in self._requests:
            if not (read := os.read(0, 1 << 20)):
                raise _EndError
            self._requests += read
        line, _, self._requests = self._requests.partition(b"\n")
        return line

    def _answer(self, n: int, answer: str, last: bool) -> None:
        printed, self._said = self._said.decode("utf-8", "replace"), b""
        frame = json.dumps({"n": n, "answer": answer, "printed": printed, "last": last}).encode() + b"\n"
        while frame:
            frame = frame[os.write(1, frame) :]

    def run(self) -> None:
        """Answer until the judge closes its end or the host is gone."""
        try:
            started = self._start()
            self._answer(0, started, not self._host)
            while self._host:
                n, trajectory = int(self._line()), self._line()
                answer = self._ask(trajectory)
                self._answer(n, answer, not self._host)
        except (_EndError, BrokenPipeError):
            pass
        finally:
            self._sweep(keep_host=False)

    # -- the function's side

    def _start(self) -> str:
        poll = self._poll(self._control)
        why = self._watch(poll, self._settings.start_s, self._control.fileno(), "did not start")
        if not why:
            said = self._control.recv(1 << 16).decode("utf-8", "replace")
            why = "" if said == "{}" else said or _error("ended its process while it was imported")
        self._sweep(keep_host=not why)
        return why or "{}"

    def _ask(self, trajectory: bytes) -> str:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                try:
                    socket.send_fds(self._control, [b"c"], [theirs.fileno()])
                except OSError:
                    self._sweep(keep_host=False)
                    return _error("ended its process")
            answer = self._converse(ours, trajectory)
        self._sweep(keep_host=True)
        if self._host and not self._host_is_ready():
            self._sweep(keep_host=False)
        return answer

    def _converse(self, channel: socket.socket, trajectory: bytes) -> str:
        channel.setblocking(False)
        unsent, got = memoryview(trajectory), bytearray()
        poll = self._poll(channel)
        poll.modify(channel, select.POLLIN | select.POLLOUT)
        deadline = time.monotonic() + self._settings.timeout_s
        while b"\n" not in got:
            why = self._watch(
                poll,
                deadline - time.monotonic(),
                channel.fileno(),
                f"took longer than {self._settings.timeout_s} s",
            )
            if why:
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
        """Wait until `fd` is ready. Return an error where time, memory or number of processes ran out first."""
        deadline = time.monotonic() + seconds
        look = time.monotonic() + _WATCH_MS / 1000
        while True:
            ready = poll.poll(_WATCH_MS)
            for end, _ in ready:
                if end == self._printed:
                    self._listen()
                if end == 0 and not self._requests:
                    if not (read := os.read(0, 1 << 20)):
                        raise _EndError
                    self._requests += read
            if any(end == fd for end, _ in ready):
                return ""
            if (now := time.monotonic()) > deadline:
                return _error(late)
            if now >= look:
                if why := self._over():
                    return _error(why)
                look = time.monotonic() + _WATCH_MS / 1000

    def _listen(self) -> None:
        """Keep the end of what the function printed, so that its pipe never fills."""
        with suppress(BlockingIOError):
            while read := os.read(self._printed, 1 << 16):
                self._said = (self._said + read)[-_MAX_PRINTED:]

    def _host_is_ready(self) -> bool:
        """Wait until the host has reaped its call. One that was killed by the call may look alive until then."""
        self._control.settimeout(_READY_S)
        try:
            return self._control.recv(16) == b"ready"
        except (TimeoutError, ConnectionResetError):
            return False

    def _host_lives(self) -> bool:
        return _state(self._host) not in ("", "Z")

    def _descend(self) -> list[int]:
        """Every process that comes from the host, itself included, with those that have ended but are not reaped yet."""
        if self._settings.jailed:
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]  # noqa: PTH208 - quicker
        found, todo = [], [os.getpid()]
        while todo:
            children = _children(todo.pop())
            found += children
            todo += children
        return found

    def _others(self) -> list[int]:
        """Every process that comes from the host and still runs, the host included."""
        found = self._descend()
        if len(found) > 2 * self._settings.processes:
            return found  # no time to look at each
        return [pid for pid in found if _state(pid) not in ("", "Z")]

    def _over(self) -> str:
        """What exceeds its limit now."""
        pids = self._others()
        if len(pids) > self._settings.processes:  # before anything that takes time for each of them
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

    def _sweep(self, *, keep_host: bool) -> None:
        """End every process that the function began, and the host too unless it is kept."""
        if self._settings.jailed:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGSTOP)  # all at once, so that none can fork away from the search
        ended, again = set[int](), not self._settings.jailed
        while True:
            found = {pid for pid in self._descend() if not (keep_host and pid == self._host)}
            doomed = [pid for pid in found if _state(pid) not in ("", "Z")]
            if not doomed and not again:
                break
            # A process that ended during the search may have left children, which are this one's from then on: look again.
            again = not self._settings.jailed and not found <= ended
            ended |= found
            handles = []
            for pid in doomed[:_AT_ONCE]:
                with suppress(ProcessLookupError):
                    handles.append(os.pidfd_open(pid))
                    os.kill(pid, signal.SIGKILL)
            for handle in handles:
                select.select([handle], [], [])  # readable once the process has ended
                os.close(handle)
        if keep_host and self._settings.jailed:
            with suppress(ProcessLookupError):
                os.kill(self._host, signal.SIGCONT)
        # Segments of System V shared memory outlive their processes: only the namespace's end frees them.
        if not keep_host or not self._host_lives() or _shared_memory(self._settings):
            self._host = 0


def _error(why: str) -> str:
    return json.dumps({"error": why})


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the third (the state) on; empty where the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def _state(pid: int) -> str:
    return fields[0] if (fields := _stat(pid)) else ""


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
    """Bytes that a process holds: its share of shared pages, or all of them where the kernel does not tell its share."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]) * resource.getpagesize()
    return 0


def _shared_memory(settings: Settings) -> int:
    """Bytes of System V shared memory segments in the sandbox."""
    if not settings.jailed:
        return 0
    with suppress(OSError):
        rows = Path("/proc/sysvipc/shm").read_text("ascii").splitlines()[1:]
        return sum(int(row.split()[3]) for row in rows)
    return 0


def main() -> None:
    """Answer until stdin ends."""
    settings = Settings(**json.loads(sys.argv[1]))
    # The function's processes have the same user: none of them may trace this one or open its descriptors.
    _prctl(_PR_SET_DUMPABLE, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not settings.jailed:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # The kernel reaps what ends: processes whose parents are gone become children of this one.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _Warden(settings).run()


if __name__ == "__main__":
    main()
