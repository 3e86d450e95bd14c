"""Reward functions in processes of their own: one that hangs, crashes or exhausts memory fails only its own score.

`RewardFunction` is the judge's side of the process, `sandbox_worker.py` the other; they exchange a line of JSON for
each trajectory. One bubblewrap command makes the sandbox. The function sees the system's libraries, Python, the folders
of its search path and what `judge.rewards.readable` names, all of it read-only and without the installation's folder.
It has no network and sees no other process. docs/judging.md says what is guaranteed with and without bubblewrap.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from judge.reward_parts import is_usable
from pipeline.config import ConfigError, RewardConfig
from pipeline.telemetry.logs import get_logger

logger = get_logger("judge.rewards.sandbox")

_MAX_MESSAGE = 16 << 20
"""Bytes of an answer."""
_WORKER = str(Path(__file__).with_name("sandbox_worker.py"))
_START_S = 30.0
"""Seconds for importing the function's module, which the first call's time limit does not include."""
_STOP_S = 5.0
"""Time that the worker gets to end after SIGTERM, and then after SIGKILL."""
_ENVIRONMENT = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "LANG": "C.UTF-8",
    # The cores are for the inference server and the trainer, and a thread pool takes address space.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_BROKEN = (
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.IncompleteRead,
    anyio.EndOfStream,
    anyio.DelimiterNotFound,
    msgspec.DecodeError,
)
"""What reading or writing raises if the worker has ended, or wrote something else than an answer."""
_SYSTEM = (
    "/usr",
    "/bin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/sys/devices/system/cpu",
)
"""What Python and the system's libraries read."""
# Root gets a user namespace too, so that no process inside has a capability outside.
_BWRAP = (
    "bwrap",
    "--unshare-all",
    "--unshare-user",
    "--die-with-parent",
    "--new-session",
    "--as-pid-1",
    "--cap-drop",
    "ALL",
)


class RewardFunctionError(Exception):
    """A reward function returned no number. The message says why."""


class RewardImportError(RewardFunctionError):
    """The module or the function of `judge.rewards` can't be imported. The message names both and says why."""


class FunctionReward(msgspec.Struct):
    """The worker's answer about one trajectory: what the function returned, or why it returned no reward."""

    reward: float = 0.0
    calls: dict[str, float] = {}
    """Rewards of single calls, by `call` in the function's argument, as text."""
    error: str = ""
    message: str = ""
    """The text of an exception, which may quote a run."""
    printed: str = ""


class RewardFunction:
    """One function of the settings. Open it with `async with RewardFunction(config).open() as call`."""

    def __init__(self, config: RewardConfig, hidden: tuple[str, ...] = ()) -> None:
        """`hidden` are folders that a sandboxed function cannot see: the installation's."""
        self._config, self._hidden = config, hidden
        self._process: anyio.abc.Process | None = None
        self._answers: BufferedByteReceiveStream | None = None
        self._turn = anyio.Lock()  # one call at a time: the worker answers in the order of the calls
        self._sandboxed = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RewardFunction]:
        """Start the process, which imports the function, allow calls within the block, and end it with the block. If it
        can't be started for another reason than the import, such as too little memory, the first call tries again.

        Raises `ConfigError` if the settings require a sandbox and this machine has none, or the function can't be
        imported."""
        isolate = self._config.isolate
        fault = "" if isolate == "off" else await anyio.to_thread.run_sync(sandbox_fault)
        if fault and isolate == "require":
            raise ConfigError(
                f'judge.rewards: {self._config.name} has isolate = "require", but {fault}; '
                'isolate = "auto" runs the function without a sandbox if none is available'
            )
        if fault:
            logger.warning("reward function runs without a sandbox", entry=self._config.entry, reason=fault)
        self._sandboxed = not fault and isolate != "off"
        try:
            await self._ensure_worker()
        except RewardImportError as error:
            raise ConfigError(f"judge.rewards: {self._config.name}: {error}") from error
        except RewardFunctionError as error:
            logger.warning("reward function did not start", entry=self._config.entry, reason=str(error))
        try:
            yield self
        finally:
            await self._stop()

    async def __call__(self, trajectory: dict[str, Any]) -> FunctionReward:
        """Return the reward of a trajectory. Raises `RewardFunctionError`."""
        entry = self._config.entry
        async with self._turn:
            process = await self._ensure_worker()
            assert process.stdin is not None
            async with self._stopping_worker_on_failure(self._config.timeout_s):
                await process.stdin.send(msgspec.json.encode(trajectory) + b"\n")
                answer = await self._receive()
        if answer.printed or answer.message:
            logger.debug("reward function printed or raised", entry=entry, text=answer.printed, message=answer.message)
        if answer.error:
            raise RewardFunctionError(f"{entry} {answer.error}")
        for number, where in ((answer.reward, ""), *((n, " for a call") for n in answer.calls.values())):
            if not is_usable(number):
                raise RewardFunctionError(f"{entry} returned a number{where} that is not from -1e15 to 1e15")
        return answer

    @asynccontextmanager
    async def _stopping_worker_on_failure(self, seconds: float) -> AsyncIterator[None]:
        """Stop the worker, and with it all processes of the call, if the block fails, takes too long or is cancelled:
        otherwise the next call would read the answer to this one. Raises `RewardFunctionError` if the worker broke or
        was too slow."""
        try:
            with anyio.fail_after(seconds):
                yield
        except BaseException as error:
            await self._stop()
            if isinstance(error, (*_BROKEN, TimeoutError)):
                broken = "ended its process, or its answer can't be read"
                fault = f"took longer than {seconds:g} s" if isinstance(error, TimeoutError) else broken
                raise RewardFunctionError(f"{self._config.entry} {fault}; see the judge's log") from error
            raise

    async def _receive(self) -> FunctionReward:
        """Return the worker's next message. Raises one of `_BROKEN`."""
        assert self._answers is not None
        return msgspec.json.decode(await self._answers.receive_until(b"\n", _MAX_MESSAGE), type=FunctionReward)

    async def _ensure_worker(self) -> anyio.abc.Process:
        """Return the worker process, with the function imported; start it if none is running. Raises
        `RewardFunctionError` if it can't be started, and `RewardImportError` if it can't import the function."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self._stop()
        entry, path = self._config.entry, search_path()
        settings = {name: getattr(self._config, name) for name in ("entry", "memory_mb", "processes")}
        settings |= {"path": path, "sandboxed": self._sandboxed}
        # -I: environment and working directory do not affect what the worker itself imports.
        argv = [sys.executable, "-I", "-u", _WORKER, msgspec.json.encode(settings).decode()]
        if self._sandboxed:
            argv = sandboxed(argv, (*path, *self._config.readable, _WORKER), self._hidden)
        try:
            self._process = await anyio.open_process(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None,
                env={"PATH": os.environ.get("PATH", ""), **_ENVIRONMENT},
                start_new_session=True,
            )
        except OSError as error:  # such as no memory, or too many processes or open files
            raise RewardFunctionError(f"the process of {entry} cannot be started: {error}") from error
        assert self._process.stdout is not None
        self._answers = BufferedByteReceiveStream(self._process.stdout)
        async with self._stopping_worker_on_failure(_START_S):
            started = await self._receive()
        if started.error:
            await self._stop()
            raise RewardImportError(f"{entry} cannot be imported: {started.error}")
        return self._process

    async def _stop(self) -> None:
        """End the worker and all processes of its call: on SIGTERM it ends those first; in a sandbox the kernel ends
        them with it."""
        process, self._process, self._answers = self._process, None, None
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            for end in (process.terminate, process.kill):
                with suppress(ProcessLookupError):
                    end()
                with anyio.move_on_after(_STOP_S):
                    await process.wait()
                    break
            await process.aclose()


def sandbox_fault() -> str:
    """Return why no sandbox can be made on this machine, or an empty string if one can."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return "bubblewrap is not installed: install bubblewrap (Debian: apt-get install bubblewrap)"
    return _try_sandbox(bwrap)


@functools.cache
def _try_sandbox(bwrap: str) -> str:
    """Make a sandbox by the program `bwrap`. Return why that failed, or an empty string. Tried once per process."""
    python = sandboxed([sys.executable, "-I", "-c", ""])
    try:
        tried = subprocess.run(python, capture_output=True, text=True, check=False, timeout=_START_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{bwrap} does not work here: {error}"
    why = tried.stderr.strip() or f"exit code {tried.returncode}"
    return f"{bwrap} does not work here: {why}" if tried.returncode else ""


def search_path() -> list[str]:
    """Return the `sys.path` of a reward function: the working directory, then the `sys.path` of this process."""
    # Python puts this folder on the path if a script in it is started. Its modules would shadow others.
    own_folder = str(Path(__file__).parent)
    paths = [str(Path.cwd()), *(str(Path(p).absolute()) for p in sys.path if p and p != own_folder)]
    return list(dict.fromkeys(paths))


def sandboxed(argv: list[str], readable: tuple[str, ...] = (), hidden: tuple[str, ...] = ()) -> list[str]:
    """Return the command that runs `argv` in a sandbox. The sandbox shows, read-only, the system's libraries, Python,
    and the files and folders `readable`. The folders `hidden` look empty in it, even within readable ones."""
    # A virtual environment may be a link.
    python = (sys.prefix, os.path.realpath(sys.prefix), sys.base_prefix, os.path.realpath(sys.executable))
    paths = sorted({os.path.abspath(p) for p in (*_SYSTEM, *python, *readable)})  # noqa: PTH100 - links stay
    outermost = [p for p in paths if not any(p.startswith(f"{outer}/") for outer in paths)]
    mounts = [option for path in outermost for option in ("--ro-bind-try", path, path)]
    mounts += ["--proc", "/proc", "--dev", "/dev"]
    for folder in {form for h in hidden for form in (Path(h).absolute(), Path(h).resolve()) if form.is_dir()}:
        mounts += ["--tmpfs", str(folder), "--remount-ro", str(folder)]
    return [*_BWRAP, *mounts, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--", *argv]
