"""The judge of this program: one process `journeywork judge serve`, which scores all its groups.

`journeywork.art.rewards.ruler` asks it. A request is a line of JSON with an id on the process's standard input, and its
answer a line with this id on its standard output; a thread reads the answers. So groups are judged at the same time,
and the judge's libraries are imported once."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from tempfile import TemporaryFile
from typing import Any

import pydantic

_STOP_S = 10.0
"""How long the process may take to end."""
_ANSWER_S = 3600.0
"""How long the process may take for a group."""
_ATTEMPTS = 2
"""Processes that a group is given to: it is scored by the next one if the first dies."""
_ERROR_BYTES = 4000
"""Bytes of the process's log in an error message."""


class JudgeDiedError(Exception):
    """The process ended before it answered. The message is the end of its log."""


class JudgeProcess:
    """One process. It ends with the program, because its standard input does."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._log = TemporaryFile()  # noqa: SIM115 - open as long as the process
        # A process: the judge is a service's code, which this package does not import.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "judge.commands.main", "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self._writing, self._numbers = threading.Lock(), itertools.count()
        self._answers: dict[int, Future[dict[str, Any]]] = {}
        self.alive = True
        self._reader = threading.Thread(target=self._read, name="journeywork judge", daemon=True)
        self._reader.start()
        atexit.register(self.close)

    def ask(self, request: dict[str, Any], environment: Mapping[str, str]) -> Future[dict[str, Any]]:
        """Send a request. The answer's future raises `JudgeDiedError` if there is none. Blocks while the process does
        not read, as while it imports its libraries."""
        changed = {name: value for name, value in environment.items() if self._environment.get(name) != value}
        answer: Future[dict[str, Any]] = Future()
        answer.set_running_or_notify_cancel()  # it can't be cancelled, so that the reader can always set it
        with self._writing:
            number = next(self._numbers)
            line = json.dumps({"id": number, "environment": changed, **request}, default=_json_form) + "\n"
            self._answers[number] = answer
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended, which the reader tells
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()
            if not self.alive:
                self._fail()
        return answer

    def close(self) -> None:
        """Kill the process, which records nothing, and what it started: it leads a session of its own."""
        atexit.unregister(self.close)
        if self._reader.is_alive():  # until its output is closed, so the session is this one's still
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._reader.join(_STOP_S)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._log.close()

    def _read(self) -> None:
        """Set each answer that the process writes as the result of its request's future, until the process ends; then
        the other futures get an error (`_fail`). Runs in a thread."""
        assert self._process.stdout is not None
        with self._process.stdout:
            for line in self._process.stdout:
                try:
                    answer = json.loads(line)
                    waiting = self._answers.pop(answer["id"])
                except (ValueError, TypeError, KeyError):
                    continue  # a library of the judge has printed it
                waiting.set_result(answer)
        self._process.wait()
        with self._writing:
            self.alive = False
            self._fail()

    def _fail(self) -> None:
        """Give every request that waits for an answer a `JudgeDiedError` with the end of the process's log. Called with
        `_writing` held, after the process ended."""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _ERROR_BYTES))
        why = self._log.read().decode(errors="replace").strip()
        while self._answers:
            self._answers.popitem()[1].set_exception(JudgeDiedError(why))


def _json_form(value: Any) -> Any:
    """Return what JSON can hold for a value that it can't, such as a choice of OpenAI's client."""
    return value.model_dump() if isinstance(value, pydantic.BaseModel) else str(value)


_starting = threading.Lock()
_process: JudgeProcess | None = None


async def ask_judge(request: dict[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the answer of the program's judge to `request`, a request of `judge.commands.serve` that has no `id` yet.
    The first request starts the process. One that died is started again, `_ATTEMPTS` times in all. Raises
    `JudgeDiedError`, and `ValueError` if there is no answer within `_ANSWER_S` seconds."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await asyncio.wrap_future(await asyncio.to_thread(_ask, request, environment))
        except TimeoutError as error:
            raise ValueError(f"the judge's process did not answer within {_ANSWER_S:.0f} s") from error
        except JudgeDiedError:
            if attempt == _ATTEMPTS:
                raise
    raise AssertionError("unreachable")


def _ask(request: dict[str, Any], environment: Mapping[str, str]) -> Future[dict[str, Any]]:
    """Send a request to the program's process, which is started if none runs. Blocks, so it is called in a thread."""
    global _process
    with _starting:
        if _process is None or not _process.alive:
            _process = JudgeProcess()
        process = _process
    return process.ask(request, environment)
