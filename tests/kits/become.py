"""How a forked process becomes a program: its namespaces, capabilities, descriptors and command line, and its run as
`python -m` would run it. For `tests.kits.warm`."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import os
import runpy
import signal
import struct
import sys
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

HIGH = 512
"""Descriptors from here on are none of a program's own."""
SPAWN = "from multiprocessing.spawn import spawn_main;"
"""The beginning of the code with which `multiprocessing` starts an interpreter."""
_DROP_CAPABILITY, _GAIN_NO_PRIVILEGE = 24, 38
_libc = ctypes.CDLL(None)


def place(places: Mapping[int, int]) -> None:
    """Give this process these descriptors (number: its source), and no others."""
    high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH) for number, fd in places.items()}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) < HIGH:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(int(name))
    for number, fd in high.items():
        os.dup2(fd, number)
        os.close(fd)


def enter(namespaces: Sequence[str]) -> bool:
    """Enter the namespaces at these paths. Returns false if one can't be entered."""
    try:
        handles = [
            os.open(path, os.O_RDONLY) for path in namespaces
        ]  # the paths may not exist in those entered
    except OSError:
        return False
    return not any(_libc.setns(handle, 0) for handle in handles)


def confine() -> None:
    """Give up every capability for good."""
    _libc.prctl(_GAIN_NO_PRIVILEGE, 1, 0, 0, 0)
    for capability in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
        _libc.prctl(_DROP_CAPABILITY, capability)
    if _libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)):  # version 3, this process; three empty sets
        raise OSError("the capabilities can't be given up")


def show(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Write the command line and the environment to where /proc reads them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    bounds = [int(field) for field in fields[45:49]]  # arg_start, arg_end, env_start, env_end
    for strings, start, end in ((argv, *bounds[:2]), ([f"{k}={v}" for k, v in env.items()], *bounds[2:])):
        data = b"".join(os.fsencode(string) + b"\0" for string in strings)[: end - start]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, data, len(data))


def run(program: Sequence[str]) -> NoReturn:
    """Run a module as `python -m` does, and end with its status."""
    code: int | str | None = 0
    try:
        main = types.ModuleType("__main__")
        if program[0].startswith(SPAWN):
            sys.argv[:] = ["-c", *program[1:]]
            contents = compile(program[0], "<string>", "exec")
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # the module may be imported already
                _, spec, contents = runpy._get_module_details(program[0])  # type: ignore[attr-defined]
            main.__dict__.update(
                __spec__=spec, __file__=spec.origin, __loader__=spec.loader, __package__=spec.parent,
                __cached__=spec.cached,
            )  # fmt: skip
            sys.argv[:] = [spec.origin, *program[1:]]
        sys.modules["__main__"] = main
        exec(contents, main.__dict__)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
        code = 1 if isinstance(end.code, str) else end.code
    except BaseException as error:  # noqa: BLE001
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code and int(code) < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(int(code or 0) & 0xFF)
