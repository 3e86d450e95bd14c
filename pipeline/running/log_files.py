"""The logs of a run, merged by time: `journeywork logs`.

    journeywork logs                       every service, oldest first
    journeywork logs -f gateway trainer    two of them, and what they write from now on
    journeywork logs -n 20 --level warning
    journeywork logs --json                one JSON object a line

Services write JSON lines; NATS and vLLM write their own formats, whose times are read too. A line without a time (of a
traceback, for example) belongs to the line before it. A file that was truncated is read from its beginning again.
"""

from __future__ import annotations

import argparse
import heapq
import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import anyio
import msgspec
from rich.console import Console
from rich.text import Text

from pipeline.arguments import whole_number
from pipeline.config import ConfigError
from pipeline.printing import visible
from pipeline.running.runs import find_run

LEVELS = ("debug", "info", "warning", "error", "critical")
_STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold red", "debug": "dim"}
_POLL_S = 0.2
_NATS = re.compile(r"\[\d+\] (\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d+) \[(\w{3})\] (.*)")
_VLLM = re.compile(r"(?:\([^)]*\) )*(DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d-\d\d \d\d:\d\d:\d\d) (.*)")
_NATS_LEVELS = {"WRN": "warning", "ERR": "error", "FTL": "critical", "DBG": "debug", "TRC": "debug"}
_NAMED = ("at", "level", "service", "logger", "event", "exception")
"""Fields of a service's line that `shown` does not print as `name=value`."""


@dataclass(frozen=True)
class Entry:
    """One line of a log."""

    at: float
    """Seconds since the Unix epoch."""
    service: str
    level: str
    text: str
    fields: dict[str, Any] = field(default_factory=dict)


def parse(line: str, service: str, before: Entry | None) -> Entry:
    """Return the entry of a line. `before` is the entry above it, from which a line without a time takes time and
    level."""
    if line.startswith("{") and (entry := _structured(line, service)) is not None:
        return entry
    if match := _NATS.match(line):
        at = datetime.strptime(match[1], "%Y/%m/%d %H:%M:%S.%f").timestamp()
        return Entry(at, service, _NATS_LEVELS.get(match[2], "info"), match[3])
    if match := _VLLM.match(line):
        return Entry(_without_year(match[2], before), service, match[1].lower(), match[3])
    if before is None:
        return Entry(0.0, service, "info", line)
    return Entry(before.at, service, before.level, line)


def _structured(line: str, service: str) -> Entry | None:
    """Return the entry of a JSON line; None if it is no line of a service."""
    try:
        record = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    if not isinstance(record, dict) or not isinstance(at := record.get("at"), int | float):
        return None
    text = str(record.get("event", ""))
    if trace := record.get("exception"):
        text += f"\n{trace}"
    fields = {name: value for name, value in record.items() if name not in _NAMED}
    return Entry(float(at), service, str(record.get("level", "info")), text, fields)


def _without_year(text: str, before: Entry | None) -> float:
    """Return the time of `month-day hour:minute:second`: this year's, or last year's where that would lie in the
    future. It is in whole seconds, so it is raised to that of the entry `before`."""
    now = datetime.now()
    at = datetime.strptime(f"{now.year}-{text}", "%Y-%m-%d %H:%M:%S")
    if at.timestamp() > now.timestamp() + 86_400:
        at = at.replace(year=now.year - 1)
    return max(at.timestamp(), before.at) if before is not None else at.timestamp()


class LogFile:
    """One file, which may not exist yet."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        """`offset`: the byte from which on it is read."""
        self.service = path.name.removesuffix(".log")
        self._path, self._offset = path, offset
        self._last: Entry | None = None

    def entries(self, most: int | None = None) -> Iterator[Entry]:
        """Yield the entries of the whole lines since the last call, the newest `most` of them (`None`: all)."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            lines = self._lines(file)
            for line in lines if most is None else deque(lines, maxlen=most):
                if text := line.decode("utf-8", "replace").rstrip():
                    self._last = parse(text, self.service, self._last)
                    yield self._last

    def _lines(self, file: IO[bytes]) -> Iterator[bytes]:
        if file.seek(0, os.SEEK_END) < self._offset:
            self._offset = 0
        file.seek(self._offset)
        for line in file:
            if not line.endswith(b"\n"):
                return  # it is being written
            self._offset += len(line)
            yield line


class Logs:
    """The log files of a run."""

    def __init__(self, folder: Path, services: Sequence[str] = ()) -> None:
        """Raises `ConfigError` where a service has no log in `folder`."""
        self._folder, self._services = folder, services
        self._files: dict[Path, LogFile] = {}
        present = sorted(path.stem for path in folder.glob("*.log"))
        if missing := [s for s in services if s not in present]:
            raise ConfigError(
                f"{folder} has no log of {', '.join(missing)}; there are: {', '.join(present) or 'none'}"
            )

    def entries(self, most: int | None = None) -> Iterator[Entry]:
        """Yield what was written since the last call in the order of time, of each file the newest `most` lines at
        most."""
        for path in sorted(self._folder.glob("*.log")):
            if path not in self._files and (not self._services or path.stem in self._services):
                self._files[path] = LogFile(path)
        return heapq.merge(*(file.entries(most) for file in self._files.values()), key=lambda entry: entry.at)


def errors(path: Path, offset: int, most: int = 5) -> list[str]:
    """Return the first line of each error from byte `offset` of a log on, the newest `most` of them."""
    file = LogFile(path, offset)
    entries = [e for e in file.entries() if e.level in ("error", "critical")]
    lines = [shown(replace(e, text=e.text.partition("\n")[0]), 0).plain for e in entries[-most:]]
    return [line.partition(f"{file.service} ")[2] for line in lines]


def shown(entry: Entry, width: int) -> Text:
    """Return an entry as a line: time, service (padded to `width`), text and fields."""
    at = datetime.fromtimestamp(entry.at, UTC).strftime("%H:%M:%S.%f")[:-3] if entry.at else " " * 12
    line = Text(f"{at} ", style="dim")
    line.append(f"{entry.service:<{width}} ", style="cyan")
    line.append(visible(entry.text), style=_STYLES.get(entry.level, ""))
    for name, value in entry.fields.items():
        said = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        line.append(f" {name}=", style="dim").append(visible(said))
    return line


def as_json(entry: Entry) -> str:
    """Return an entry as one JSON object."""
    record = {"at": entry.at, "service": entry.service, "level": entry.level, "event": entry.text}
    return msgspec.json.encode(record | entry.fields).decode()


async def show(logs: Logs, args: argparse.Namespace, console: Console) -> None:
    """Print what the files hold, and with `--follow` what is written to them, until cancelled."""
    floor = LEVELS.index(args.level)

    def write(entries: Iterable[Entry]) -> None:
        for entry in entries:
            if args.json:
                sys.stdout.write(as_json(entry) + "\n")
            else:
                console.print(shown(entry, 10), soft_wrap=True)
        sys.stdout.flush()

    def wanted(most: int | None = None) -> Iterator[Entry]:
        return (e for e in logs.entries(most) if e.level not in LEVELS or LEVELS.index(e.level) >= floor)

    # Without a level, the newest lines of the run are among the newest of each file.
    entries = wanted(args.lines if floor == 0 else None)
    write(entries if args.lines is None else deque(entries, maxlen=args.lines))
    while args.follow:
        await anyio.sleep(_POLL_S)
        write(await anyio.to_thread.run_sync(lambda: list(wanted())))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="journeywork logs", description="The logs of a run, merged by time (UTC)."
    )
    parser.add_argument("services", nargs="*", metavar="service", help="gateway, trainer, …; default: all")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what is written from now on")
    parser.add_argument(
        "-n", "--lines", type=whole_number(0), help="the last so many lines; default: all, with -f 50"
    )
    parser.add_argument("--level", choices=LEVELS, default=LEVELS[0], help="leave out lines below this level")
    parser.add_argument("--run-dir", help="default: the running one under runs/, else the newest")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0; 2 for invalid usage."""
    args = _parser().parse_args(argv)
    if args.follow and args.lines is None:
        args.lines = 50
    try:
        folder = find_run(args.run_dir) / "logs"
        if not folder.is_dir():
            raise ConfigError(f"{folder.parent} is no run with logs: name another with --run-dir")
        logs = Logs(folder, args.services)
    except ConfigError as error:
        sys.stderr.write(f"journeywork logs: {error}\n")
        return 2
    try:
        anyio.run(show, logs, args, Console(highlight=False))
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # nobody reads: Python would complain when it flushes at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
