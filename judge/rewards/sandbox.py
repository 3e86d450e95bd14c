"""Reward functions in processes of their own: a function that hangs, crashes or eats memory fails its own score only.

`judge.rewards.sandbox_worker` says how a call is kept apart from the judge and from other calls, `judge.rewards.sandbox_view` what it can see.
docs/judging.md says what is promised with bubblewrap and what without it.
"""

from __future__ import annotations

import math
import os
import signal
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

from judge.rewards import sandbox_view
from pipeline.config import ConfigError, RewardConfig
from pipeline.telemetry.logs import get_logger

log = get_logger("judge.rewards.sandbox")

_MAX_FRAME = 16 << 20
"""An answer of 1 MB and what was printed, both with every character escaped."""
_WORKER = str(Path(__file__).with_name("sandbox_worker.py"))
_START_S = 30.0
"""For importing the function's module, before the first call's own timeout runs."""
_GRACE_S = 10.0
"""The worker keeps its limits of time itself; one that is so much late is broken."""
_STOP_S = 5.0
_BROKEN = (
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.IncompleteRead,
    anyio.EndOfStream,
    anyio.DelimiterNotFound,
)


class RewardFunctionError(Exception):
    """A reward function gave no number."""


class _Frame(msgspec.Struct):
    """What the worker says of one call; `answer` is JSON that the function wrote."""

    n: int
    answer: str
    printed: str = ""
    last: bool = False


class RewardFunction:
    """One function of the settings; open it with `async with RewardFunction(config).open() as call`."""

    def __init__(self, config: RewardConfig, hidden: tuple[str, ...] = ()) -> None:
        """`hidden` are folders that a sandboxed function never sees: the run directory."""
        self._config, self._hidden = config, hidden
        self._process: anyio.abc.Process | None = None
        self._answers: BufferedByteReceiveStream | None = None
        self._turn = anyio.Lock()
        self._calls = 0
        self._jailed: bool | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RewardFunction]:
        """The process starts with the first call and ends with the block.

        Raises `ConfigError` where the settings require a sandbox and this machine has none."""
        await self._decide()
        try:
            yield self
        finally:
            await self._stop()

    async def _decide(self) -> bool:
        """Whether this function runs in a sandbox."""
        if self._jailed is None:
            fault = (
                "" if self._config.isolate == "off" else await anyio.to_thread.run_sync(sandbox_view.fault)
            )
            if fault and self._config.isolate == "require":
                raise ConfigError(
                    f'judge.rewards: {self._config.name} has isolate = "require", but {fault}; '
                    'isolate = "auto" runs the function without a sandbox where there is none'
                )
            if fault:
                log.warning("reward function runs without a sandbox", entry=self._config.entry, reason=fault)
            self._jailed = not fault and self._config.isolate != "off"
        return self._jailed

    async def __call__(self, trajectory: dict[str, Any]) -> float:
        """Return the reward of a trajectory. Raises `RewardFunctionError` with what went wrong."""
        entry = self._config.entry
        async with self._turn:
            process = await self._running()
            self._calls += 1
            try:
                with anyio.fail_after(self._config.timeout_s + _GRACE_S):
                    assert process.stdin is not None
                    await process.stdin.send(b"%d\n%b\n" % (self._calls, msgspec.json.encode(trajectory)))
                    frame = await self._frame(self._calls)
            except (*_BROKEN, TimeoutError) as error:
                await self._stop()
                raise RewardFunctionError(f"{entry} ended its process") from error
            except BaseException:
                # Cancelled between question and answer: the next answer would be of this question.
                await self._stop()
                raise
            if frame.last:
                await self._stop()
        if frame.printed:
            log.info("reward function printed", entry=entry, text=frame.printed)
        try:
            answer = msgspec.json.decode(frame.answer)
        except msgspec.DecodeError as error:
            raise RewardFunctionError(f"{entry} returned {frame.answer[:200]}, which is no number") from error
        if not isinstance(answer, dict):  # the function wrote it past the worker
            answer = {"reward": answer}
        if "error" in answer:
            raise RewardFunctionError(f"{entry}: {answer['error']}")
        value = answer.get("reward")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RewardFunctionError(f"{entry} returned {value!r}, which is no number")
        return float(value)

    async def _frame(self, n: int) -> _Frame:
        assert self._answers is not None
        line = await self._answers.receive_until(b"\n", _MAX_FRAME)
        try:
            frame = msgspec.json.decode(line, type=_Frame)
        except msgspec.DecodeError as error:
            raise anyio.BrokenResourceError from error
        if frame.n != n:
            raise anyio.BrokenResourceError
        return frame

    async def _argv(self) -> list[str]:
        path = sandbox_view.search_path()
        jailed = await self._decide()
        settings = {
            "entry": self._config.entry,
            "path": path,
            "memory_mb": self._config.memory_mb,
            "processes": self._config.processes,
            "timeout_s": self._config.timeout_s,
            "start_s": _START_S,
            "jailed": jailed,
        }
        # -I: neither the environment nor the working directory says what the worker itself imports.
        argv = [sys.executable, "-I", "-u", _WORKER, msgspec.json.encode(settings).decode()]
        if not jailed:
            return argv
        extra = (*self._config.readable, _WORKER)
        return await anyio.to_thread.run_sync(
            sandbox_view.command, self._config.entry, path, extra, self._hidden, argv
        )

    async def _running(self) -> anyio.abc.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self._stop()
        entry = self._config.entry
        self._process = await anyio.open_process(
            await self._argv(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
            env={
                "PATH": os.environ.get("PATH", ""),
                "PYTHONDONTWRITEBYTECODE": "1",
                "LANG": "C.UTF-8",
                # The cores belong to the inference server and the trainer; a pool of threads also takes address space.
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._answers = BufferedByteReceiveStream(self._process.stdout)
        try:
            with anyio.fail_after(_START_S + _GRACE_S):
                hello = await self._frame(0)
        except (*_BROKEN, TimeoutError) as error:
            await self._stop()
            raise RewardFunctionError(f"{entry} did not start; the judge's log may say why") from error
        except BaseException:
            await self._stop()
            raise
        if hello.last:
            await self._stop()
            why = msgspec.json.decode(hello.answer).get("error")
            raise RewardFunctionError(f"{entry} can't be imported: {why}\n{hello.printed}".strip())
        return self._process

    async def _stop(self) -> None:
        process, self._process, self._answers = self._process, None, None
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            # At the end of its input the worker ends what the function began, then itself.
            with suppress(*_BROKEN):
                assert process.stdin is not None
                await process.stdin.aclose()
            with anyio.move_on_after(_STOP_S):
                await process.wait()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            await process.aclose()
