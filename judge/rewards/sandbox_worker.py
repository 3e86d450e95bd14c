"""The process side of `judge.rewards.sandbox`.

This process imports the function's module once, reads trajectories from the judge, and scores each in a fork of itself.
In a sandbox it is process 1 of its own PID namespace, so that all processes there end with it. The judge ends it when a
call takes too long.

Argument: JSON with the fields of `Settings`. On stdin: a line of JSON for each trajectory. On stdout, one JSON line
each, with the fields of `judge.rewards.sandbox.FunctionReward`: first an empty one once the function is imported.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import json
import os
import resource
import signal
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

_PR_SET_PDEATHSIG = 1
_MAX_ANSWER = 1 << 20
_MAX_PRINTED = 4096
_ANSWERED = 77
"""Exit status of a call that has written its answer."""


class Settings(NamedTuple):
    """The judge's settings for the function."""

    entry: str
    path: list[str]
    """`sys.path` of the function."""
    memory_mb: int
    processes: int
    sandboxed: bool
    """This process is process 1 of a sandbox."""


class _InvalidError(Exception):
    """What a function returned is no reward. The message names types only: a text may quote a trajectory."""


def _finite_number(value: Any, where: str = "") -> float:
    """Return a value that a function returned as a float. It may be a number of another library, such as numpy's, or a
    `Decimal`; the SDK takes the same (`journeywork.trajectory.finite_number`). `where` ends the error's text. Raises
    `_InvalidError` for anything else, and for infinity and NaN."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise _InvalidError(f"a {type(value).__name__}{where}, not a number")
    if not abs(number := float(value)) < float("inf"):
        raise _InvalidError(f"a number{where} that is not finite")
    return number


def _answer_of(value: Any) -> dict[str, Any]:
    """Return the value that a function returned as the judge expects it: the run's reward, and rewards of calls. Raises
    `_InvalidError` if it is neither a number nor a dict with these."""
    calls: Any = {}
    if isinstance(value, dict):
        calls = value.get("calls", {})
        if not (value.keys() <= {"reward", "calls"} and isinstance(calls, dict)):
            raise _InvalidError('a dict other than {"reward": number, "calls": {call: number}}')
        if "reward" not in value:
            raise _InvalidError('a dict without "reward"')
        value = value["reward"]
    rewards_of_calls = {str(call): _finite_number(number, " for a call") for call, number in calls.items()}
    return {"reward": _finite_number(value), "calls": rewards_of_calls}


def _end_with_parent() -> None:
    """Have the kernel end this process when its parent ends, also if the parent is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _score_and_exit(function: Any, trajectory: bytes, answers: int) -> NoReturn:
    """Score one trajectory and end. Runs in a fork of `main`, so that nothing of a call is left for the next; `answers`
    is the judge's pipe."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_with_parent()
    os.dup2(0, 1)  # what programs of the function print is dropped
    os.dup2(0, 2)
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            answer = _answer_of(function(json.loads(trajectory)))
        except _InvalidError as error:
            answer = {"error": f"returned {error}"}
        except BaseException as error:  # noqa: BLE001 - whatever user code raises is an answer, `SystemExit` included
            # Where, without the message: it may quote a trajectory.
            *_, (frame, line) = traceback.walk_tb(error.__traceback__)
            where = f"{type(error).__name__} in line {line} of {Path(frame.f_code.co_filename).name}"
            answer = {"error": f"raised {where}", "message": str(error)[:2000]}
    _send(answers, {**answer, "printed": printed.getvalue()[-_MAX_PRINTED:]})
    os._exit(_ANSWERED)


def _send(answers: int, answer: dict[str, Any]) -> None:
    """Write an answer as one line to `answers`, the file descriptor of the judge's pipe. One that is too long is
    replaced by an error."""
    frame = json.dumps(answer).encode() + b"\n"
    if len(frame) > _MAX_ANSWER:
        frame = b'{"error": "answered more than 1 MB"}\n'
    with os.fdopen(os.dup(answers), "wb") as channel:
        channel.write(frame)


def main() -> None:
    """Import the function, then score a trajectory for each line of stdin until it ends."""
    settings = Settings(**json.loads(sys.argv[1]))
    # The judge's pipes get other numbers; what the module prints at import goes to the judge's log.
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (settings.memory_mb << 20,) * 2)
    sys.path[:] = settings.path
    module, _, name = settings.entry.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except BaseException as error:  # noqa: BLE001 - whatever user code raises is an answer
        _send(answers, {"error": f"{type(error).__name__}: {error}"[:2000]})
        return
    if settings.sandboxed:
        # Only now: the judge's log, to which the module may have printed, can be a file.
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        if tuple(int(n) for n in os.uname().release.split("-")[0].split(".")[:2]) >= (5, 14):
            # Before, the limit counts all of the user's processes, not only those of this namespace.
            resource.setrlimit(resource.RLIMIT_NPROC, (settings.processes,) * 2)
    child = 0

    def end_call(*signalled: object) -> None:
        """End all processes of the call: in a sandbox every other process, outside of one its process group."""
        if child:
            with suppress(ProcessLookupError):
                os.kill(-1 if settings.sandboxed else -child, signal.SIGKILL)
        if signalled:
            os._exit(1)

    signal.signal(signal.SIGTERM, end_call)
    _end_with_parent()
    _send(answers, {})
    for trajectory in os.fdopen(requests, "rb"):
        if (child := os.fork()) == 0:
            _score_and_exit(function, trajectory, answers)
        _, status = os.waitpid(child, 0)
        end_call()
        with suppress(ChildProcessError):  # once there is no other process
            while settings.sandboxed:
                os.waitpid(-1, 0)
        child = 0
        if os.waitstatus_to_exitcode(status) != _ANSWERED:
            _send(answers, {"error": "ended its process"})


if __name__ == "__main__":
    main()
