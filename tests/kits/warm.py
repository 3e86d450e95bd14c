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
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pipeline.running import child
from tests.kits import become

ROOT = Path(__file__).parents[2]
COLD = "JOURNEYWORK_TEST_COLD"
_SCRIPT = str(Path(sys.executable).with_name("journeywork"))
_KINDS = {
    "vllm": (
        "vllm.entrypoints.openai.api_server", "tests.rollout_gateway.vllm_plugin.engine_child",
        "tests.trainer.engine.vllm_experts_child",
    ),
    "torch": (
        "trainer", "tests.trainer", "torch.distributed.run", "tests.kits.crash.fork_server", "tests.kits.warm_program",
        "examples",
    ),
}  # fmt: skip
"""Kinds of warm processes, and the modules, and packages of modules, that are forked from each."""
_COMMANDS = ("up", "what-if", "train", "fork", "check-model", "export")
"""Commands of `journeywork` that import torch, or that start a trainer."""
_LEAVES = (
    "trainer", "judge", "store", "store.showing.dashboard", "pipeline.tracing.exporter", "tests.kits.warm",
)  # fmt: skip
"""Programs that start no others of ours."""
_IMPORTS = {
    "torch": (
        "pipeline.commands.main", "pipeline.running.supervisor", "pipeline.tracing.exporter",
        "rollout_gateway.service", "rollout_gateway.sampler.service", "judge.service", "store.service",
        "store.showing.dashboard.service",
        "store.commands.what_if", "trainer.service", "transformers.models.qwen3.modeling_qwen3", "peft", "openai",
        "transformers.models.auto.modeling_auto", "journeywork", "torch.distributed.run",
    ),
    "vllm": (  # after those of the other kind
        "vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.async_llm", "vllm.v1.engine.core",
        "vllm.v1.executor.uniproc_executor", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen3",
    ),
}  # fmt: skip
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}
"""Variables with which warm processes are started: no test asks Hugging Face's hub."""
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
_HEEDED = (
    "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "TORCHELASTIC", "TORCH_NCCL", "TORCHINDUCTOR",
    "HF_TOKEN", *_ENVIRONMENT,
)  # fmt: skip
"""Those of them that a forked process can still heed, or reads later, or has in any case."""
_LAUNCH = ["-S", "-c", child._LAUNCH]
_ROOM = {"arguments": 1 << 14, "environment": 1 << 16}
"""Bytes in which a forked process can show its own."""
_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)
_execute: Callable[..., int] = _posixsubprocess.fork_exec
_become = os.execv


# -- the process that asks ------------------------------------------------------------------------------------------


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k.startswith(_READ_AT_START) and not k.startswith(_HEEDED)}


_BEFORE = _read_at_start(os.environ)
"""Before the tests: libraries that they import add variables of their own to this process."""


def _starts_as_warm(env: Mapping[str, str]) -> bool:
    """Whether libraries start in this environment as they did in a warm process."""
    given, now = _read_at_start(env), _read_at_start(os.environ)
    return all(given.get(k) in (_BEFORE.get(k), now.get(k)) for k in {*given, *_BEFORE, *now})


def _kind_of(program: Sequence[str]) -> str:
    """Return the kind of warm process that has imported what a program does; empty: none."""
    module, command = program[0], program[1] if len(program) > 1 else ""
    if module in ("pipeline", "pipeline.commands.main"):
        if command == "up" and not {"--vllm-url", "--services", "--dry-run"} & set(program):
            return "vllm"
        if program[1:3] == ["exec", "vllm"]:
            return "vllm"
        return "torch" if command in _COMMANDS else ""
    if module == __name__:
        return "torch" if command == "vllm" else ""  # which goes on from there
    for kind, names in _KINDS.items():
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return kind
    return ""


def _program(
    argv: Sequence[str], env: Mapping[str, str], otherwise: str = ""
) -> tuple[_Server | None, list[str]]:
    """Return the server that starts a command, with the module (or the code) and the arguments; `None`: it is
    executed. `otherwise`: the kind of warm process for a module that needs none."""
    if argv[0] == _SCRIPT:
        program = ["pipeline", *argv[1:]]
    elif argv[0] == sys.executable and "-m" in argv[1:3] and argv[1] in ("-m", "-u"):
        program = list(argv[argv.index("-m") + 1 :])
    elif argv[0] == sys.executable and argv[-2].startswith(become.SPAWN) and _own is not None:
        program = list(argv[-2:])
    else:
        return None, []
    kind = _kind_of(program) or otherwise
    paths = set(filter(None, env.get("PYTHONPATH", "").split(os.pathsep)))
    more = paths - {str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    server = _servers.get((kind, *more))
    if _own is not None:  # what a warm program starts has all modules too; "vllm" has those of "torch"
        server = _own if kind in ("", "torch", _own.kind) and not more else None
    if COLD in env or not _starts_as_warm(env):
        return None, []
    return server, program


class _Server:
    """This process's side of a process from which programs are forked."""

    def __init__(self, kind: str, packages: str = "") -> None:
        """`packages` is a folder of packages that the process can import too."""
        self.kind = kind
        self._packages = packages
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self) -> None:
        """Fork the process from which the programs of this one will be forked, while this one has no threads."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            self._connection = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, become.HIGH))
            ours.close()
            return
        null = os.open(os.devnull, os.O_RDWR)
        become.place({0: null, 1: null, 2: null, 3: theirs.fileno()})
        _serve(socket.socket(fileno=3), self.kind)

    def start(self, order: dict[str, Any], handles: Sequence[int]) -> int:
        with self._lock:
            if self._process is not None and (code := self._process.poll()) is not None:
                # One test or its machine's want of memory ended it: the others go on with another.
                sys.stderr.write(f"the process that has imported {self.kind} ended with {code}\n")
                assert self._connection is not None
                self._connection.close()
                self._connection = None
            connection = self._connection or self._first()
        # What is forked there is orphaned at once, and comes to the nearest ancestor that takes orphans.
        with _adopting:
            _libc.prctl(_SET_SUBREAPER, 1)
            try:
                socket.send_fds(connection, [json.dumps(order).encode()], handles)
                pid = int(connection.recv(64))
            finally:
                _libc.prctl(_SET_SUBREAPER, 0)
        if not pid:
            raise OSError(f"the namespaces {order['namespaces']} can't be entered")
        return pid

    def _first(self) -> socket.socket:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = filter(None, (self._packages, os.environ.get("PYTHONPATH")))
        with theirs:
            handle = str(theirs.fileno())
            command = [sys.executable, "-m", __name__, self.kind, handle, "-" * _ROOM["arguments"]]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=ROOT,
                env={
                    **os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths),
                    "ROOM": "-" * _ROOM["environment"],
                },
            )  # fmt: skip
        assert self._connection.recv(64) == b"imported"
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.wait(60)


_servers: dict[tuple[str, ...], _Server] = {(kind,): _Server(kind) for kind in _KINDS}
"""By kind and, if they have one, the folder of packages."""
_adopting = threading.Lock()
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
        "argv": argv, "namespaces": [f"/run/netns/{network}"] if network else [], "confined": False,
    }  # fmt: skip
    return server.start(order, list(places.values()))


def start_beside(
    pid: int, argv: list[str], env: dict[str, str], cwd: str, descriptors: Mapping[int, int]
) -> int:
    """Start a program in the namespaces of the process `pid`, without any capability and with these descriptors
    (number: its source). Returns 0 if it is to be executed."""
    server, program = _program(argv, env, "torch")
    if server is None or COLD in os.environ:
        return 0
    order = {
        "program": program, "env": env, "cwd": cwd, "places": list(descriptors), "new_session": True, "umask": -1,
        "parent": 0, "cores": sorted(os.sched_getaffinity(0)), "argv": argv, "confined": True,
        # That of the users is the last: it takes the right to enter the others.
        "namespaces": [f"/proc/{pid}/ns/{kind}" for kind in ("net", "ipc", "uts", "mnt", "pid", "user")],
    }  # fmt: skip
    return server.start(order, list(descriptors.values()))


def install() -> None:
    """Start the programs of this process from here on."""
    subprocess._fork_exec = _posixsubprocess.fork_exec = _start  # type: ignore[attr-defined]


def fork_with(packages: Path) -> None:
    """Also fork programs that have this folder in their PYTHONPATH."""
    for kind in _KINDS:
        _servers.setdefault((kind, str(packages)), _Server(kind, str(packages)))


def close() -> None:
    for server in _servers.values():
        server.close()


# -- the process that is forked ---------------------------------------------------------------------------------------


def _serve(connection: socket.socket, kind: str) -> NoReturn:
    """Fork the programs that the other side asks for, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    while True:
        data, handles, _, _ = socket.recv_fds(connection, 1 << 20, 200)
        if not data:
            os._exit(0)
        order = json.loads(data)
        go, parent_gone = os.pipe()
        told, tell = os.pipe()
        middle = os.fork()
        if not middle:
            pid = os.fork() if become.enter(order["namespaces"]) else -1
            if pid:
                os.write(tell, str(max(pid, 0)).encode())
                os._exit(0)
            os.close(parent_gone)
            os.read(go, 1)  # until it has its parent
            _begin(order, handles, kind)
        os.waitpid(middle, 0)
        os.close(parent_gone)
        connection.send(os.read(told, 64))
        for fd in (go, told, tell, *handles):
            os.close(fd)


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
        if order["confined"]:
            become.confine()
        become.place(dict(zip(order["places"], handles, strict=True)))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(order["env"])
        become.show(order["argv"], order["env"])
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
            os.execv, os.execve = _replace, _replace
    except BaseException:  # noqa: BLE001 - a forked process must not return into the loop of its parent
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(1)
    become.run(order["program"])


def _replace(path: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> NoReturn:
    """In place of `os.execv` and `os.execve`."""
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    server, program = _program(list(map(os.fspath, argv)), os.environ)
    if server is not None:
        sys.stdout.flush()
        become.run(program)
    _become(path, argv)


if __name__ == "__main__":
    from tests.kits import warm

    _, imported, descriptor, _ = sys.argv
    for group in ("torch", imported):
        for name in _IMPORTS[group]:
            importlib.import_module(name)
    server = socket.socket(fileno=int(descriptor))
    server.send(b"imported")
    warm._serve(server, imported)
