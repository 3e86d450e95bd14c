"""The process side of `judge.rewards.sandbox`.

This process imports the function's module once, reads trajectories from the judge, and scores each in a fork of itself,
with a time limit. In a sandbox it is process 1 of its own PID namespace, so that all processes there end with it.

Argument: JSON with the fields of `Settings`. On stdin: a line of JSON for each trajectory. On stdout, one JSON line
each: first `{"answer": "{}"}` once the function is imported, then `{"answer": "{\\"reward\\": 0.5}", "printed": "…"}`.
An answer holds `reward` or `error`.
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

_PR_SET_PDEATHSIG = 1
_MAX_ANSWER = 1 << 20
_MAX_PRINTED = 4096


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


def _error(why: str) -> str:
    return json.dumps({"error": why[:2000]})


def _number(value: Any) -> float:
    """Return a number of a library, such as numpy's, or a `Decimal`. The SDK takes the same as a reward
    (`journeywork.trajectory.finite_number`). Raises `TypeError`."""
    if isinstance(value, bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"{type(value).__name__} is not a number")
    return float(value)


def _answer(reward: Any) -> str:
    """Return the answer with what a function returned. JSON has no number that is not finite."""
    try:
        return json.dumps({"reward": reward}, default=_number, allow_nan=False)
    except ValueError as error:
        return _error(f"returned {'a number that is not finite' if 'JSON compliant' in str(error) else 'no JSON'}")


def _raised(error: BaseException) -> str:
    """Say what a function raised and where, without the message: it may quote a trajectory."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{type(error).__name__} in line {line} of {Path(frame.f_code.co_filename).name}"


def _call(function: Any, trajectory: bytes, answers: int, printed: int) -> NoReturn:
    """Score a trajectory, in a process of its own. Everything but its answer and what it prints is closed."""
    os.setsid()
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.closerange(3, answers)
    os.closerange(answers + 1, 1 << 16)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        answer = _answer(function(json.loads(trajectory)))
    except BaseException as error:  # noqa: BLE001 - whatever user code raises is an answer, `SystemExit` included
        answer = json.dumps({"error": _raised(error), "message": str(error)[:2000]})
    with suppress(BaseException):
        sys.stdout.flush()
    with open(answers, "wb", buffering=0) as channel:
        channel.write(answer.encode() + b"\n")
    os._exit(0)


def _score(settings: Settings, function: Any, trajectory: bytes, requests: int) -> tuple[str, str]:
    """Return the answer about a trajectory, as JSON, and what the call printed. Raises `_ClosedError`."""
    answers, write_answer = os.pipe()
    printed, write_printed = os.pipe()
    if (child := os.fork()) == 0:
        _call(function, trajectory, write_answer, write_printed)
    os.close(write_answer)
    os.close(write_printed)
    try:
        return _listen(answers, printed, requests, settings.timeout_s)
    finally:
        _kill(child, settings.sandboxed)
        os.close(answers)
        os.close(printed)


def _listen(answers: int, printed: int, requests: int, timeout_s: float) -> tuple[str, str]:
    """Wait for the call's answer, for at most `timeout_s`."""
    got, said, why = b"", b"", ""
    poll = select.poll()
    for end in (answers, printed, requests):
        poll.register(end, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    while not why and b"\n" not in got:
        wait_ms = max(0.0, deadline - time.monotonic()) * 1000
        # What is printed is read first, so that all of it is there when the answer is.
        for end, _ in sorted(poll.poll(wait_ms), key=lambda ready: ready[0] == answers):
            if end == requests:
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
            why = why or f"took longer than {timeout_s} s"
    os.set_blocking(printed, False)
    with suppress(BlockingIOError):
        said = (said + os.read(printed, 1 << 16))[-_MAX_PRINTED:]
    answer = _error(why) if why else got.partition(b"\n")[0].decode("utf-8", "replace")
    return answer, said.decode("utf-8", "replace")


def _kill(child: int, sandboxed: bool) -> None:
    """End a call: in a sandbox every other process, outside of one its session."""
    if not sandboxed:
        for kill in (os.killpg, os.kill):  # it may have no session yet
            with suppress(ProcessLookupError):
                kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):  # once there is no other process
        while True:
            os.waitpid(-1, 0)


def main() -> None:
    """Answer until stdin ends."""
    settings = Settings(**json.loads(sys.argv[1]))
    # The judge's pipes get other numbers; what the module prints at import goes to the judge's log.
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def send(answer: str, printed: str = "") -> None:
        frame = json.dumps({"answer": answer, "printed": printed}).encode() + b"\n"
        while frame:
            frame = frame[os.write(answers, frame) :]

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (settings.memory_mb << 20,) * 2)
    sys.path[:] = settings.path
    module, _, name = settings.entry.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except BaseException as error:  # noqa: BLE001 - whatever user code raises is an answer
        send(_error(f"{type(error).__name__}: {error}"))
        return
    if settings.sandboxed:
        # Only now: the judge's log, to which the module may have printed, can be a file.
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        if tuple(int(n) for n in os.uname().release.split("-")[0].split(".")[:2]) >= (5, 14):
            # Before, the limit counts all of the user's processes, not only those of this namespace.
            resource.setrlimit(resource.RLIMIT_NPROC, (settings.processes,) * 2)
    with suppress(_ClosedError, BrokenPipeError), os.fdopen(requests, "rb") as trajectories:
        send("{}")
        for trajectory in trajectories:
            send(*_score(settings, function, trajectory, requests))


if __name__ == "__main__":
    main()
