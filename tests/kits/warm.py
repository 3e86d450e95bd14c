"""Programs that import torch or vLLM start in milliseconds here: they are forked from a process that has imported both
them and every service, instead of importing them for ten seconds and more, vLLM in each of its three processes.

After `install`, `subprocess` starts the programs of `_kind_of` so; every other command is executed as always. What is
started is a true child of the process that asked for it: its id, exit status, signals, process group, output and
inherited descriptors are those of an executed one, and /proc shows its command line and environment. It differs in one
thing: what modules do when they are imported is done already.

A command whose environment has `COLD` is executed: for tests of what a start itself does.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pipeline.running import child

ROOT = Path(__file__).parents[2]
COLD = "JOURNEYWORK_TEST_COLD"
_SCRIPT = str(Path(sys.executable).with_name("journeywork"))
_KINDS = {
    "vllm": (
        "vllm.entrypoints.openai.api_server", "tests.rollout_gateway.vllm_plugin.engine_child",
        "examples.tictactoe.job",
    ),
    "torch": (
        "trainer", "tests.trainer", "torch.distributed.run", "tests.kits.crash.fork_server", "tests.kits.warm_program",
        "examples",
    ),
}  # fmt: skip
"""Kinds of warm processes, and the modules, and packages of modules, that are forked from each."""
_COMMANDS = ("up", "what-if", "train", "fork", "influence", "check-model", "export")
"""Commands of `journeywork` that import torch, or that start a trainer."""
_LEAVES = ("trainer", "judge", "store", "store.showing.dashboard", "pipeline.telemetry.exporter")
"""Programs that start no others of ours."""
_IMPORTS = {
    "torch": (
        "pipeline.cli", "pipeline.running.supervisor", "pipeline.telemetry.exporter", "rollout_gateway.service",
        "rollout_gateway.sampler.service", "judge.service", "store.service", "store.showing.dashboard.service",
        "store.commands.what_if", "trainer.service", "transformers.models.qwen3.modeling_qwen3", "peft", "openai",
        "transformers.models.auto.modeling_auto", "journeywork", "torch.distributed.run",
    ),
    "vllm": (  # after those of the other kind
        "vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.async_llm", "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen3",
    ),
}  # fmt: skip
_ENVIRONMENT = {"torch": {}, "vllm": {"HF_HUB_OFFLINE": "1"}}
"""Variables with which each kind is started."""
_READ_AT_START = (
    "PYTHON",
    "LD_",
    "MKL_",
    "TORCH",
    "PYTORCH_",
    "HF_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "LITELLM_",
)
"""Beginnings of the variables that the interpreter and libraries read when they start."""
_HEEDED = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "TORCHELASTIC", "TORCH_NCCL")
"""Those of them that a forked process can still heed, or reads later."""
_LAUNCH = ["-S", "-c", child._LAUNCH]
_SPAWN = "from multiprocessing.spawn import spawn_main;"
"""The beginning of the code with which `multiprocessing` starts an interpreter."""
_HIGH = 512
"""Descriptors from here on are none of a program's own."""
_ROOM = {"arguments": 1 << 14, "environment": 1 << 16}
"""Bytes in which a forked process can show its own."""
_SET_DEATH_SIGNAL, _SET_SUBREAPER, _NETWORK = 1, 36, 0x40000000
_libc = ctypes.CDLL(None)
_execute: Callable[..., int] = _posixsubprocess.fork_exec
_become = os.execv


# -- the process that asks ------------------------------------------------------------------------------------------


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k.startswith(_READ_AT_START) and not k.startswith(_HEEDED)}


def _kind_of(program: Sequence[str]) -> str:
    """Return the kind of warm process that has imported what a program does; empty: none."""
    module, command = program[0], program[1] if len(program) > 1 else ""
    if module in ("pipeline", "pipeline.cli"):
        if command == "up" and not {"--vllm-url", "--services", "--dry-run"} & set(program):
            return "vllm"
        return "torch" if command in _COMMANDS else ""
    for kind, names in _KINDS.items():
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return kind
    return ""


def _program(argv: Sequence[str], env: Mapping[str, str]) -> tuple[_Server | None, list[str]]:
    """Return the server that starts a command, with the module (or the code) and the arguments; `None`: it is
    executed."""
    if argv[0] == _SCRIPT:
        program = ["pipeline", *argv[1:]]
    elif argv[0] == sys.executable and "-m" in argv[1:3] and argv[1] in ("-m", "-u"):
        program = list(argv[argv.index("-m") + 1 :])
    elif argv[0] == sys.executable and argv[-2].startswith(_SPAWN) and _own is not None:
        program = list(argv[-2:])
    else:
        return None, []
    kind = _kind_of(program)
    server = _servers.get(kind)
    if _own is not None:  # what a warm program starts has all modules too; "vllm" has those of "torch"
        server = _own if kind in ("", "torch", _own.kind) else None
    given = {**os.environ, **_ENVIRONMENT[server.kind]} if server and server is not _own else os.environ
    paths = set(filter(None, env.get("PYTHONPATH", "").split(os.pathsep)))
    ours = {str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    if COLD in env or not paths <= ours or _read_at_start(env) != _read_at_start(given):
        return None, []
    return server, program


class _Server:
    """This process's side of a process from which programs are forked."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self) -> None:
        """Fork the process from which the programs of this one will be forked, while this one has no threads."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            self._connection = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, _HIGH))
            ours.close()
            return
        null = os.open(os.devnull, os.O_RDWR)
        _place({0: null, 1: null, 2: null, 3: theirs.fileno()})
        _serve(socket.socket(fileno=3), self.kind)

    def start(self, order: dict[str, Any], handles: Sequence[int]) -> int:
        with self._lock:
            connection = self._connection or self._first()
            # What is forked there is orphaned at once, and comes to the nearest ancestor that takes orphans.
            _libc.prctl(_SET_SUBREAPER, 1)
            try:
                socket.send_fds(connection, [json.dumps(order).encode()], handles)
                return int(connection.recv(64))
            finally:
                _libc.prctl(_SET_SUBREAPER, 0)

    def _first(self) -> socket.socket:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            handle = str(theirs.fileno())
            command = [sys.executable, "-m", __name__, self.kind, handle, "-" * _ROOM["arguments"]]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=ROOT,
                env={**os.environ, **_ENVIRONMENT[self.kind], "ROOM": "-" * _ROOM["environment"]},
            )  # fmt: skip
        assert self._connection.recv(64) == b"imported"
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.wait(60)


_servers = {kind: _Server(kind) for kind in _KINDS}
_own: _Server | None = None
"""Where this process was forked so itself: the server of what it starts."""


def _start(*given: Any) -> int:
    """In place of `_posixsubprocess.fork_exec`."""
    (
        args, _, close_fds, keep, cwd, env_list, stdin, _, _, stdout, _, stderr, _, failed, _, new_session, group,
        gid, gids, uid, umask, before, _,
    ) = given  # fmt: skip
    argv = [os.fsdecode(a) for a in args]
    env = dict(os.environ)
    if env_list is not None:
        env = dict(os.fsdecode(entry).split("=", 1) for entry in env_list)  # type: ignore[misc]
    network = argv[3] if argv[:3] == ["ip", "netns", "exec"] else ""
    argv = argv[4:] if network else argv
    launched = argv[1:4] == _LAUNCH
    argv = argv[5:] if launched else argv
    server, program = _program(argv, env)
    plain = close_fds and before is None and (gid, gids, uid) == (None, None, None) and group < 0
    if server is None or not plain:
        return _execute(*given)
    places = {i: fd if fd >= 0 else i for i, fd in enumerate((stdin, stdout, stderr))}
    places |= {fd: fd for fd in keep if fd != failed}
    folder = os.path.abspath(os.fsdecode(cwd)) if cwd is not None else os.getcwd()  # noqa: PTH100, PTH109
    order = {
        "program": program, "env": env, "cwd": folder, "places": list(places), "new_session": bool(new_session),
        "umask": umask, "parent": os.getpid() if launched else 0, "cores": sorted(os.sched_getaffinity(0)),
        "argv": argv, "network": network,
    }  # fmt: skip
    return server.start(order, list(places.values()))


def install() -> None:
    """Start the programs of this process from here on."""
    subprocess._fork_exec = _posixsubprocess.fork_exec = _start  # type: ignore[attr-defined]


def close() -> None:
    for server in _servers.values():
        server.close()


# -- the process that is forked ---------------------------------------------------------------------------------------


def _place(places: Mapping[int, int]) -> None:
    """Give this process these descriptors (number: its source), and no others."""
    high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH) for number, fd in places.items()}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) < _HIGH:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(int(name))
    for number, fd in high.items():
        os.dup2(fd, number)
        os.close(fd)


def _serve(connection: socket.socket, kind: str) -> NoReturn:
    """Fork the programs that the other side asks for, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    while True:
        data, handles, _, _ = socket.recv_fds(connection, 1 << 20, 200)
        if not data:
            os._exit(0)
        go, parent_gone = os.pipe()
        told, tell = os.pipe()
        middle = os.fork()
        if not middle:
            if pid := os.fork():
                os.write(tell, str(pid).encode())
                os._exit(0)
            os.close(parent_gone)
            os.read(go, 1)  # until it has its parent
            _begin(json.loads(data), handles, kind)
        os.waitpid(middle, 0)
        os.close(parent_gone)
        connection.send(os.read(told, 64))
        for fd in (go, told, tell, *handles):
            os.close(fd)


def _show(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Write the command line and the environment to where /proc reads them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    bounds = [int(field) for field in fields[45:49]]  # arg_start, arg_end, env_start, env_end
    for strings, start, end in ((argv, *bounds[:2]), ([f"{k}={v}" for k, v in env.items()], *bounds[2:])):
        data = b"".join(os.fsencode(string) + b"\0" for string in strings)[: end - start]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, data, len(data))


def _begin(order: dict[str, Any], handles: Sequence[int], kind: str) -> NoReturn:
    """Become the program of an order."""
    try:
        if order["parent"]:
            os.umask(0o77)
            _libc.prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
            if os.getppid() != order["parent"]:
                os._exit(1)
        if order["new_session"]:
            os.setsid()
        if order["umask"] >= 0:
            os.umask(order["umask"])
        os.sched_setaffinity(0, order["cores"])
        if order["network"]:
            with Path("/run/netns", order["network"]).open() as space:
                if _libc.setns(space.fileno(), _NETWORK):
                    raise OSError(f"the network namespace {order['network']} can't be entered")
        _place(dict(zip(order["places"], handles, strict=True)))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(order["env"])
        _show(order["argv"], order["env"])
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) or "-u" in order["argv"][1:2]
        sys.stdout.reconfigure(write_through=unbuffered)  # type: ignore[union-attr]
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.stderr.reconfigure(line_buffering=True, write_through=unbuffered)  # type: ignore[union-attr]
        if os.environ.get("PYTHONFAULTHANDLER"):
            faulthandler.enable()
        os.chdir(order["cwd"])
        given = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        sys.path[:] = [order["cwd"], *given, *(p for p in sys.path if p not in (order["cwd"], *given))]
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        if threads := os.environ.get("OMP_NUM_THREADS"):
            sys.modules["torch"].set_num_threads(int(threads))
        if order["program"][0] not in _LEAVES:
            global _own
            _own = _Server(kind)
            _own.fork()
            install()
            os.execv = _replace
    except BaseException:  # noqa: BLE001 - a forked process must not return into the loop of its parent
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(1)
    _run(order["program"])


def _replace(path: str, argv: Sequence[str]) -> NoReturn:
    """In place of `os.execv`."""
    server, program = _program(list(map(os.fspath, argv)), os.environ)
    if server is not None:
        sys.stdout.flush()
        _run(program)
    _become(path, argv)


def _run(program: Sequence[str]) -> NoReturn:
    """Run a module as `python -m` does, and end with its status."""
    code: int | str | None = 0
    try:
        main = types.ModuleType("__main__")
        if program[0].startswith(_SPAWN):
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


if __name__ == "__main__":
    from tests.kits import warm

    _, imported, descriptor, _ = sys.argv
    for group in ("torch", imported):
        for name in _IMPORTS[group]:
            importlib.import_module(name)
    server = socket.socket(fileno=int(descriptor))
    server.send(b"imported")
    warm._serve(server, imported)
