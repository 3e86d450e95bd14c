"""The judge model called from processes of their own, so that litellm's CPU time is not the judge's.

A call through litellm takes some milliseconds of CPU, so one process makes a bounded number of calls a second, however
many the provider would take. `Callers` starts `judge.workers` processes (this module, run as a program) and hands each
call to the one with the fewest; a frame is four bytes of length and MessagePack, over the process's standard input and output.

A process that dies fails the calls it had with `ModelError`, which the judge tries again, and another one takes its
place. When the judge dies its processes read the end of their input and stop.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, BinaryIO

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from judge.models.llm import Complete, ContextWindowError, Messages, ModelError, Reply, open_router
from pipeline.config import ConfigError, JudgeConfig
from pipeline.telemetry.logs import configure as configure_log
from pipeline.telemetry.logs import get_logger

log = get_logger("judge.models.callers")

_LARGEST = 256 * 1024 * 1024
_RESTART_S = 1.0


class _Call(msgspec.Struct, frozen=True):
    number: int
    messages: Messages
    schema: dict[str, Any] | None


class _Answer(msgspec.Struct, frozen=True):
    number: int
    reply: Reply | None = None
    error: str = ""
    too_long: bool = False
    """The error is a `ContextWindowError`."""


class _Start(msgspec.Struct, frozen=True):
    """The first frame a process gets; its first answer has number 0 and an error where it can't work."""

    config: JudgeConfig


_call = msgspec.msgpack.Decoder(_Call)
_answer = msgspec.msgpack.Decoder(_Answer)
_start = msgspec.msgpack.Decoder(_Start)


def _frame(value: object) -> bytes:
    body = msgspec.msgpack.encode(value)
    return len(body).to_bytes(4, "little") + body


async def _read(stream: BufferedByteReceiveStream) -> bytes:
    size = int.from_bytes(await stream.receive_exactly(4), "little")
    if size > _LARGEST:
        raise anyio.BrokenResourceError
    return await stream.receive_exactly(size)


class _Process:
    """One process and the calls it has."""

    def __init__(self, process: anyio.abc.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self._in = process, process.stdin
        self._out = BufferedByteReceiveStream(process.stdout)
        self.waiting: dict[int, asyncio.Future[Reply]] = {}
        self._sending = anyio.Lock()

    async def send(self, frame: bytes) -> None:
        async with self._sending:
            await self._in.send(frame)

    async def answer(self) -> _Answer:
        """Raises `anyio.IncompleteRead` and below where the process is gone."""
        return _answer.decode(await _read(self._out))

    async def serve(self) -> None:
        """Deliver answers until the process is gone; what it had then fails."""
        try:
            while True:
                answer = await self.answer()
                future = self.waiting.pop(answer.number, None)
                if future is None or future.done():
                    continue
                if answer.reply is not None:
                    future.set_result(answer.reply)
                else:
                    kind = ContextWindowError if answer.too_long else ModelError
                    future.set_exception(kind(answer.error))
        except (
            anyio.IncompleteRead,
            anyio.EndOfStream,
            anyio.BrokenResourceError,
            anyio.ClosedResourceError,
        ):
            pass
        finally:
            for future in self.waiting.values():
                if not future.done():
                    future.set_exception(ModelError("the process that called the judge model died"))
            self.waiting.clear()


class Callers:
    """`judge.models.llm.Complete` over several processes; make it with `open_complete`."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._processes: list[_Process] = []
        self._numbers = itertools.count(1)
        self._news = anyio.Event()

    async def __call__(self, messages: Messages, schema: dict[str, Any] | None) -> Reply:
        while not self._processes:
            await self._news.wait()
        process = min(self._processes, key=lambda p: len(p.waiting))
        number = next(self._numbers)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        process.waiting[number] = future
        try:
            await process.send(_frame(_Call(number, messages, schema)))
            return await future
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise ModelError("the process that called the judge model died") from error
        finally:
            process.waiting.pop(number, None)

    def _config_of(self, number: int) -> JudgeConfig:
        """A process's share of the places at the judge model."""
        share, rest = divmod(self._config.concurrency, self._config.workers)
        return msgspec.structs.replace(self._config, concurrency=share + (number < rest))

    async def _start(self, number: int) -> _Process:
        """Raises `ConfigError` where the settings can't be used."""
        # Its log goes where ours goes. A session of its own: an interrupt is for the judge, which ends it.
        opened = await anyio.open_process(
            [sys.executable, "-m", "judge.models.callers"], stderr=None, start_new_session=True
        )
        process = _Process(opened)
        try:
            await process.send(_frame(_Start(self._config_of(number))))
            ready = await process.answer()
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError) as error:
            await _end(opened)
            raise ConfigError("a process for the judge model did not start: see the log above") from error
        if ready.error:
            await _end(opened)
            raise ConfigError(ready.error)
        return process

    async def open(self) -> None:
        """Start the processes. Raises `ConfigError` where the settings can't be used."""
        try:
            for number in range(self._config.workers):
                self._processes.append(await self._start(number))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the processes."""
        with anyio.CancelScope(shield=True):
            for process in self._processes:
                await _end(process.process)

    async def run(self) -> None:
        """Deliver answers, and replace processes that die, for as long as the judge runs."""
        async with anyio.create_task_group() as tg:
            for number, process in enumerate(self._processes):
                tg.start_soon(self._keep, number, process)

    async def _keep(self, number: int, process: _Process) -> None:
        while True:
            await process.serve()
            self._processes.remove(process)
            await _end(process.process)
            log.error("a process for the judge model died", exit_code=process.process.returncode)
            await anyio.sleep(_RESTART_S)  # one that dies at once must not be started as fast as it can
            process = await self._start(number)
            self._processes.append(process)
            self._news.set()
            self._news = anyio.Event()


async def _end(process: anyio.abc.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
    await process.aclose()


@asynccontextmanager
async def open_complete(config: JudgeConfig) -> AsyncIterator[Complete]:
    """The judge model of the settings, called from this process (`judge.workers` 0) or from so many others.

    Raises `ConfigError` where the key is missing."""
    if config.workers == 0:
        async with open_router(config) as complete:
            yield complete
        return
    callers = Callers(config)
    await callers.open()
    try:
        async with anyio.create_task_group() as tg:
            tg.start_soon(callers.run)
            yield callers
            tg.cancel_scope.cancel()
    finally:
        await callers.close()


async def _work(out: BinaryIO) -> None:
    """The process's side: calls in, answers out, until the input ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_LARGEST)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def frame() -> bytes:
        return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))

    def say(answer: _Answer) -> None:
        out.write(_frame(answer))
        out.flush()

    config = _start.decode(await frame()).config
    async with AsyncExitStack() as stack:
        try:
            complete = await stack.enter_async_context(open_router(config))
        except ConfigError as error:
            say(_Answer(0, error=str(error)))
            return
        say(_Answer(0))

        async def one(call: _Call) -> None:
            try:
                say(_Answer(call.number, await complete(call.messages, call.schema)))
            except ModelError as error:
                too_long = isinstance(error, ContextWindowError)
                say(_Answer(call.number, error=str(error), too_long=too_long))

        with suppress(asyncio.IncompleteReadError):
            async with anyio.create_task_group() as tg:
                try:
                    while True:
                        tg.start_soon(one, _call.decode(await frame()))
                finally:
                    tg.cancel_scope.cancel()


def main() -> None:
    """The process; litellm prints to standard output, so answers go through a copy of it."""
    configure_log("judge")
    # litellm hands every call to a thread and back; at Python's 5 ms a call would wait that long for each hand-over.
    sys.setswitchinterval(0.0005)
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        anyio.run(_work, out)


if __name__ == "__main__":
    main()
