"""The process side of `judge.rewards.sandbox`.

This process imports the function's module once, reads requests from the judge, and scores each trajectory in a fork of
itself, which has a pipe for its own answer and nothing else. In a sandbox it is process 1 of its own PID namespace: no
process there can signal it, and all of them end with it. After each answer every other process is killed, so that
nothing is left for the next trajectory.

Argument: JSON with the fields of `Settings`. Then on stdin, for each call: a line with the call's number and a line
with the trajectory as JSON. On stdout, one JSON line each: first `{"n": 0, "answer": "{}"}` once the function is
imported, then `{"n": <number>, "answer": "{\\"reward\\": 0.5}", "printed": "…"}`. An answer holds `reward` or
`error`.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import psutil

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_MAX_ANSWER = 1 << 20
_MAX_PRINTED = 4096
_CHECK_S = 0.025
"""Interval of the checks of memory and number of processes."""


class Settings(NamedTuple):
    """The judge's settings for the function."""

    entry: str
    path: list[str]
    """`sys.path` of the function."""
    memory_mb: int
    processes: int
    timeout_s: float
    sandboxed: bool
    """This process is process 1 of a sandbox."""


class _ClosedError(Exception):
    """The judge has closed the worker's input, or it is dead."""


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _error(why: str) -> str:
    return json.dumps({"error": why[:2000]})


def _number(value: Any) -> float:
    """Return a number of a library, such as numpy's, or a `Decimal`. The SDK takes the same as a reward
    (`journeywork.trajectory.finite_number`). Raises `TypeError`."""
    if isinstance(value, bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"{type(value).__name__} is not a number")
    return float(value)


def _raised(error: BaseException) -> str:
    """Say what a function raised and where, without the message: it may quote a trajectory."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{type(error).__name__} in line {line} of {Path(frame.f_code.co_filename).name}"


def _limit(settings: Settings) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (settings.memory_mb << 20,) * 2)
    kernel = tuple(int(n) for n in os.uname().release.split("-")[0].split(".")[:2])
    if settings.sandboxed and kernel >= (5, 14):
        # Before Linux 5.14 the limit counts all of the user's processes, not only those of this namespace.
        resource.setrlimit(resource.RLIMIT_NPROC, (settings.processes, settings.processes))


def _call(function: Any, trajectory: bytes, answers: int, printed: int) -> NoReturn:
    """Score a trajectory, in a process of its own. Everything but its answer and what it prints is closed."""
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.closerange(3, answers)
    os.closerange(answers + 1, 1 << 16)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_DUMPABLE, 1)  # libraries read /proc/self
    try:
        answer = json.dumps({"reward": function(json.loads(trajectory))}, default=_number)
    except BaseException as error:  # noqa: BLE001 - whatever user code raises is an answer, `SystemExit` included
        answer = json.dumps({"error": _raised(error), "message": str(error)[:2000]})
    with suppress(BaseException):
        sys.stdout.flush()
    with open(answers, "wb", buffering=0) as channel:
        channel.write(answer.encode() + b"\n")
    os._exit(0)


class _Worker:
    def __init__(self, settings: Settings, function: Any, requests: int) -> None:
        self._settings, self._function, self._requests = settings, function, requests
        self._input = b""

    def line(self) -> bytes:
        """Return the next line of the judge. Raises `_ClosedError`."""
        while b"\n" not in self._input:
            if not (read := os.read(self._requests, 1 << 20)):
                raise _ClosedError
            self._input += read
        line, _, self._input = self._input.partition(b"\n")
        return line

    def score(self, trajectory: bytes) -> tuple[str, str]:
        """Return the answer about a trajectory, as JSON, and what the call printed. Raises `_ClosedError`."""
        answers, write_answer = os.pipe()
        printed, write_printed = os.pipe()
        try:
            try:
                if os.fork() == 0:
                    _call(self._function, trajectory, write_answer, write_printed)
            finally:
                os.close(write_answer)
                os.close(write_printed)
            return self._listen(answers, printed)
        finally:
            self._kill_calls()
            os.close(answers)
            os.close(printed)

    def _listen(self, answers: int, printed: int) -> tuple[str, str]:
        """Wait for the call's answer, or until it exceeds a limit."""
        got, said, why = b"", b"", ""
        poll = select.poll()
        for end in (answers, printed, self._requests):
            poll.register(end, select.POLLIN)
        look = time.monotonic() + _CHECK_S
        deadline = time.monotonic() + self._settings.timeout_s
        while not why and b"\n" not in got:
            # What is printed is read first, so that all of it is there when the answer is.
            for end, _ in sorted(poll.poll(_CHECK_S * 1000), key=lambda ready: ready[0] == answers):
                if end == self._requests:
                    raise _ClosedError  # the judge sends nothing during a call
                read = os.read(end, 1 << 16)
                if end == answers:
                    got += read
                    why = "" if read else "ended its process"
                elif read:
                    said = (said + read)[-_MAX_PRINTED:]
                else:
                    poll.unregister(printed)
            if len(got) > _MAX_ANSWER:
                why = "answered more than 1 MB"
            elif time.monotonic() > deadline:
                why = why or f"took longer than {self._settings.timeout_s} s"
            elif not why and time.monotonic() > look:
                why, look = self._exceeded(), time.monotonic() + _CHECK_S
        os.set_blocking(printed, False)
        with suppress(BlockingIOError):
            while read := os.read(printed, 1 << 16):
                said = (said + read)[-_MAX_PRINTED:]
        answer = _error(why) if why else got.partition(b"\n")[0].decode("utf-8", "replace")
        return answer, said.decode("utf-8", "replace")

    def _exceeded(self) -> str:
        """Return which limit the call exceeds now, or an empty string."""
        limit, threads, memory = self._settings.processes, 0, 0
        running = psutil.Process().children(recursive=True)
        if len(running) <= limit:  # first, because the rest takes time for each of them
            for process in running:
                with suppress(psutil.Error):
                    threads += process.num_threads()
                    memory += _memory(process)
        if max(len(running), threads) > limit:
            return f"had more than {limit} processes and threads"
        if memory > self._settings.memory_mb << 20:
            return f"held more than {self._settings.memory_mb} MB of memory in {len(running)} processes"
        return ""

    def _kill_calls(self) -> None:
        """Kill every other process. Those that a killed one leaves behind become children of this one."""
        sandboxed = self._settings.sandboxed
        with suppress(ChildProcessError):  # once there is no other process
            while True:
                # In a sandbox all others at once, so that none can fork meanwhile.
                for child in [-1] if sandboxed else [p.pid for p in psutil.Process().children()]:
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                if os.waitpid(-1, 0 if sandboxed else os.WNOHANG) == (0, 0):
                    time.sleep(0.001)


def _memory(process: psutil.Process) -> int:
    """Return the bytes of memory of a process. A page that several processes share counts in part for each of them, but
    in full for a process that has made itself unreadable (`PR_SET_DUMPABLE`). Raises `psutil.Error`."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.AccessDenied:
        return int(process.memory_info().rss)


def main() -> None:
    """Answer until stdin ends."""
    settings = Settings(**json.loads(sys.argv[1]))
    # The judge's pipes get other numbers; what the module prints at import goes to the judge's log.
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def send(n: int, answer: str, printed: str = "") -> None:
        frame = json.dumps({"n": n, "answer": answer, "printed": printed}).encode() + b"\n"
        while frame:
            frame = frame[os.write(answers, frame) :]

    _limit(settings)
    sys.path[:] = settings.path
    module, _, name = settings.entry.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except BaseException as error:  # noqa: BLE001 - whatever user code raises is an answer
        send(0, _error(f"{type(error).__name__}: {error}"))
        return
    if settings.sandboxed:
        # No memory behind file descriptors (memfd): no other limit counts it. Only now, because the judge's log, to
        # which the module may have printed, can be a file.
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    # From here on no call can trace this process or open its descriptors, although it has the same user.
    _prctl(_PR_SET_DUMPABLE, 0)
    if not settings.sandboxed:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what has ended
    worker = _Worker(settings, function, requests)
    with suppress(_ClosedError, BrokenPipeError):
        send(0, "{}")
        while True:
            n, trajectory = int(worker.line()), worker.line()
            send(n, *worker.score(trajectory))


if __name__ == "__main__":
    main()
