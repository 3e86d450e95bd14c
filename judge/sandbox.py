"""Reward functions in a process of their own: a function that hangs, crashes or eats memory fails its own score only.

The process gets no environment but the search path (so no keys), its address space is bounded, and a call that takes longer
than its timeout is killed with every process it began. Where the kernel permits it without privileges, the process also gives
up the network, writing to files, and reading anything but Python, the system's libraries and the search path
(`judge.confine`); where it does not, a warning says what is missing, or with `isolate = "require"` the function does not run.
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

from pipeline.config import RewardConfig
from pipeline.log import get_logger

log = get_logger("judge.sandbox")

_MAX_ANSWER = 1 << 20
_WORKER = str(Path(__file__).with_name("sandbox_worker.py"))
_START_S = 30.0
"""For importing the function's module, before the first call's own timeout runs."""


class RewardFunctionError(Exception):
    """A reward function gave no number."""


class RewardFunction:
    """One function of the settings; open it with `async with RewardFunction(config).open() as call`."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._process: anyio.abc.Process | None = None
        self._answers: BufferedByteReceiveStream | None = None
        self._turn = anyio.Lock()
        self._warned = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RewardFunction]:
        """The process starts with the first call and ends with the block."""
        try:
            yield self
        finally:
            await self._stop()

    async def __call__(self, trajectory: dict[str, Any]) -> float:
        """Raises `RewardFunctionError` with what went wrong."""
        async with self._turn:
            process = await self._running()
            try:
                with anyio.fail_after(self._config.timeout_s):
                    assert process.stdin is not None
                    await process.stdin.send(msgspec.json.encode(trajectory) + b"\n")
                    answer = await self._answer()
            except TimeoutError as error:
                await self._stop()
                raise RewardFunctionError(
                    f"{self._config.entry} took longer than {self._config.timeout_s} s"
                ) from error
            except (
                anyio.BrokenResourceError,
                anyio.IncompleteRead,
                anyio.EndOfStream,
                anyio.DelimiterNotFound,
            ) as error:
                await self._stop()
                raise RewardFunctionError(f"{self._config.entry} ended its process") from error
            except BaseException:
                # Cancelled between question and answer: the next answer would be of this question.
                await self._stop()
                raise
        if "error" in answer:
            raise RewardFunctionError(f"{self._config.entry}: {answer['error']}")
        value = answer.get("reward")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RewardFunctionError(f"{self._config.entry} returned {value!r}, which is no number")
        return float(value)

    async def _answer(self) -> dict[str, Any]:
        assert self._answers is not None
        line = await self._answers.receive_until(b"\n", _MAX_ANSWER)
        try:
            answer = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise anyio.BrokenResourceError from error
        return answer if isinstance(answer, dict) else {}

    async def _running(self) -> anyio.abc.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        paths = [p for p in (str(Path.cwd()), os.environ.get("PYTHONPATH", "")) if p]
        self._process = await anyio.open_process(
            [
                sys.executable,
                "-u",
                _WORKER,
                self._config.entry,
                str(self._config.memory_mb),
                self._config.isolate,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
            env={
                "PYTHONPATH": os.pathsep.join(paths),
                "PATH": os.environ.get("PATH", ""),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._answers = BufferedByteReceiveStream(self._process.stdout)
        try:
            with anyio.fail_after(_START_S):
                hello = await self._answer()
        except (
            TimeoutError,
            anyio.BrokenResourceError,
            anyio.IncompleteRead,
            anyio.EndOfStream,
            anyio.DelimiterNotFound,
        ) as error:
            await self._stop()
            raise RewardFunctionError(f"{self._config.entry} did not start") from error
        if "error" in hello:
            await self._stop()
            raise RewardFunctionError(f"{self._config.entry} can't be imported: {hello['error']}")
        if (missing := tuple(hello.get("missing", ()))) and not self._warned:
            self._warned = True
            log.warning("reward function is not confined", entry=self._config.entry, missing=missing)
        return self._process

    async def _stop(self) -> None:
        process, self._process, self._answers = self._process, None, None
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            # Its whole session: what the function began ends with it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            await process.aclose()
