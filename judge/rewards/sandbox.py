"""Reward functions in processes of their own: one that hangs, crashes or exhausts memory fails only its own score.

docs/judging.md says what is guaranteed with and without bubblewrap.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from judge.reward_parts import is_usable
from judge.rewards import sandbox_view
from pipeline.config import ConfigError, RewardConfig
from pipeline.telemetry.logs import get_logger

logger = get_logger("judge.rewards.sandbox")

_MAX_MESSAGE = 16 << 20
"""Bytes of an answer of 1 MB and the printed text, both with every character escaped."""
_WORKER = str(Path(__file__).with_name("sandbox_worker.py"))
_START_S = 30.0
"""Seconds for importing the function's module, which the first call's time limit does not include."""
_GRACE_S = 10.0
"""The worker enforces the time limits itself; one that is later than this is broken."""
_STOP_S = 5.0
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


class RewardFunctionError(Exception):
    """A reward function returned no number. The message says why."""


class RewardImportError(RewardFunctionError):
    """The module or the function of `judge.rewards` can't be imported. The message names both and says why."""


class FunctionReward(NamedTuple):
    """What a reward function returned."""

    reward: float
    calls: Mapping[str, float]
    """Rewards of single calls, by `seq` as the function wrote it."""


class _WorkerMessage(msgspec.Struct):
    """The worker's message about one call. `answer` is JSON text."""

    answer: str
    printed: str = ""


class RewardFunction:
    """One function of the settings. Open it with `async with RewardFunction(config).open() as call`."""

    def __init__(self, config: RewardConfig, hidden: tuple[str, ...] = ()) -> None:
        """`hidden` are folders that a sandboxed function cannot see: the run directory."""
        self._config, self._hidden = config, hidden
        self._process: anyio.abc.Process | None = None
        self._answers: BufferedByteReceiveStream | None = None
        self._turn = anyio.Lock()
        self._sandboxed = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RewardFunction]:
        """Allow calls within the block. The process starts with the first call and ends with the block.

        Raises `ConfigError` if the settings require a sandbox and this machine has none."""
        isolate = self._config.isolate
        fault = "" if isolate == "off" else await anyio.to_thread.run_sync(sandbox_view.unavailable)
        if fault and isolate == "require":
            raise ConfigError(
                f'judge.rewards: {self._config.name} has isolate = "require", but {fault}; '
                'isolate = "auto" runs the function without a sandbox if none is available'
            )
        if fault:
            logger.warning("reward function runs without a sandbox", entry=self._config.entry, reason=fault)
        self._sandboxed = not fault and isolate != "off"
        try:
            yield self
        finally:
            await self._stop()

    async def start(self) -> None:
        """Start the process, which imports the function. Raises `ConfigError` if it can't be imported; any other
        failure is left to the first call, which tries again."""
        async with self._turn:
            try:
                await self._running()
            except RewardImportError as error:
                raise ConfigError(f"judge.rewards: {self._config.name}: {error}") from error
            except RewardFunctionError as error:
                logger.warning("reward function did not start", entry=self._config.entry, reason=str(error))

    async def __call__(self, trajectory: dict[str, Any]) -> FunctionReward:
        """Return the reward of a trajectory. Raises `RewardFunctionError`."""
        entry = self._config.entry
        async with self._turn:
            process = await self._running()
            async with self._stopping_worker_on_failure("ended its process", self._config.timeout_s):
                assert process.stdin is not None
                await process.stdin.send(msgspec.json.encode(trajectory) + b"\n")
                message = await self._receive()
        if message.printed:
            logger.debug("reward function printed", entry=entry, text=message.printed)
        try:
            answer = msgspec.json.decode(message.answer, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise RewardFunctionError(f"{entry} returned no JSON, not a number") from error
        if "error" in answer:
            logger.debug("reward function raised", entry=entry, message=answer.get("message", ""))
            raise RewardFunctionError(f"{entry}: {answer['error']}")
        value, calls = answer.get("reward"), {}
        if isinstance(value, dict):
            calls = value.get("calls", {})
            if not (value.keys() <= {"reward", "calls"} and isinstance(calls, dict)):
                raise RewardFunctionError(
                    f'{entry} returned a dict other than {{"reward": number, "calls": {{call: number}}}}'
                )
            if "reward" not in value:
                raise RewardFunctionError(f'{entry} returned a dict without "reward"')
            value = value["reward"]
        numbers = {call: self._number(number, " for a call") for call, number in calls.items()}
        return FunctionReward(self._number(value), numbers)

    def _number(self, value: object, where: str = "") -> float:
        """Return what a function returned as a reward. Raises `RewardFunctionError`."""
        fault = f"a {type(value).__name__}{where}, not a number"
        if isinstance(value, int | float):
            if is_usable(value):
                return float(value)
            fault = f"a number{where} that is not from -1e15 to 1e15"
        raise RewardFunctionError(f"{self._config.entry} returned {fault}")

    @asynccontextmanager
    async def _stopping_worker_on_failure(self, fault: str, seconds: float) -> AsyncIterator[None]:
        """Stop the worker if the block fails, takes too long or is cancelled: otherwise the next call would read the
        answer to this one. Raises `RewardFunctionError` if the worker broke, with the message `<entry> <fault>`, or
        was too slow."""
        try:
            with anyio.fail_after(seconds + _GRACE_S):
                yield
        except (*_BROKEN, TimeoutError) as error:
            await self._stop()
            if isinstance(error, TimeoutError):
                fault = f"did not answer within {seconds + _GRACE_S:g} s and was stopped; see the judge's log"
            raise RewardFunctionError(f"{self._config.entry} {fault}") from error
        except BaseException:
            await self._stop()
            raise

    async def _receive(self) -> _WorkerMessage:
        assert self._answers is not None
        line = await self._answers.receive_until(b"\n", _MAX_MESSAGE)
        return msgspec.json.decode(line, type=_WorkerMessage)

    def _argv(self) -> list[str]:
        path = sandbox_view.search_path()
        settings = {name: getattr(self._config, name) for name in ("entry", "memory_mb", "processes", "timeout_s")}
        settings |= {"path": path, "sandboxed": self._sandboxed}
        # -I: environment and working directory do not affect what the worker itself imports.
        argv = [sys.executable, "-I", "-u", _WORKER, msgspec.json.encode(settings).decode()]
        if not self._sandboxed:
            return argv
        return sandbox_view.command((*path, *self._config.readable, _WORKER), self._hidden, argv)

    async def _running(self) -> anyio.abc.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self._stop()
        entry = self._config.entry
        try:
            self._process = await anyio.open_process(
                self._argv(),
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
        async with self._stopping_worker_on_failure("did not start; see the judge's log", _START_S):
            started = msgspec.json.decode((await self._receive()).answer, type=dict[str, str])
        if (why := started.get("error")) is not None:
            await self._stop()
            raise RewardImportError(f"{entry} cannot be imported: {why}")
        return self._process

    async def _stop(self) -> None:
        process, self._process, self._answers = self._process, None, None
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            # At the end of its input the worker ends the function's processes, then itself.
            with suppress(*_BROKEN):
                assert process.stdin is not None
                await process.stdin.aclose()
            with anyio.move_on_after(_STOP_S):
                await process.wait()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            await process.aclose()
