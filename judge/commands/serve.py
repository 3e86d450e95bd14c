"""`journeywork judge serve`: score groups that a program sends, one JSON object a line, until standard input ends.

A line is a `Request`. Its answer is that of `journeywork judge score`, on one line of standard output, with the
request's `id`; `error` says why a group was not scored. Groups are scored at the same time and answered as they are
done. The libraries of a judge model are imported once, which takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from judge.commands.score import answer_of, score_group
from judge.errors import UnscoredError
from judge.labelled import GroupFile
from judge.models.chat import well_formed
from pipeline.config import ConfigError, load
from pipeline.telemetry.logs import get_logger
from pipeline.terminal.printing import visible_json

logger = get_logger("judge.commands.serve")


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """A group to score."""

    id: int
    group: GroupFile
    settings: list[str] = []
    """Settings as `--set` takes them."""
    environment: dict[str, str] = {}
    """Environment variables that the program has set since this process began."""


async def serve() -> None:
    """Answer the requests of standard input until it ends, or nobody reads the answers. Requests that are still being
    answered then are dropped: the program that sent them waits no more."""
    async with anyio.create_task_group() as answers:
        while line := await anyio.to_thread.run_sync(sys.stdin.buffer.readline):
            try:
                request = msgspec.json.decode(line, type=Request)
            except (msgspec.DecodeError, RecursionError) as error:
                _write(_failure_line(_read_id(line), f"the request can't be read: {error}"))
            else:
                answers.start_soon(_answer, request)
        answers.cancel_scope.cancel()


def _read_id(line: bytes) -> int | None:
    """Return the id of a request that msgspec can't decode, for the answer that says so; `None` if it names none. It
    may hold NaN, which other programs write: Python's own decoder takes it."""
    try:
        number = json.loads(line)["id"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return number if isinstance(number, int) and abs(number) < 1 << 63 else None


def _write(line: bytes) -> None:
    """Write a line to standard output at once. Raises `BrokenPipeError` if nobody reads it any more."""
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _answer_line(number: int | None, answer: dict[str, Any]) -> bytes:
    """Return an answer as a line without characters that a terminal acts on."""
    return visible_json(msgspec.json.encode({"id": number, **answer}).decode()).encode() + b"\n"


def _failure_line(number: int | None, why: str) -> bytes:
    """Return the answer to a request that was not scored, as a line."""
    return _answer_line(number, {"scores": {}, "error": well_formed(why)})


async def _answer(request: Request) -> None:
    """Score a group and write the answer. An error of any kind is written as an answer too, because the program waits
    for one."""
    # For all requests from now on, as one program sends them: judge models read their API keys from the environment.
    os.environ.update(request.environment)
    try:
        config = load(None, request.settings)
        line = _answer_line(request.id, answer_of(config, await score_group(config, request.group)))
    except (ConfigError, UnscoredError) as error:
        line = _failure_line(request.id, str(error))
    except Exception as error:  # noqa: BLE001 - the other groups are scored all the same
        logger.error("a group was not scored", exc=error, request=request.id)
        line = _failure_line(request.id, repr(error))
    _write(line)


def add_command(commands: Any) -> None:
    """Add `serve` to the subcommands of `journeywork judge`."""
    parser = commands.add_parser("serve", help="scores of the groups that a program sends, a line each")
    parser.set_defaults(run=run_command)


def run_command(_: argparse.Namespace) -> None:
    """Answer until standard input ends, or the program that reads the answers does."""
    try:
        anyio.run(serve)
    except* BrokenPipeError:
        # Python flushes standard output once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
