"""The logs of a run, merged by time: `journeywork logs`.

    journeywork logs                       every service, oldest first
    journeywork logs -f gateway trainer    two of them, and what they write from now on
    journeywork logs -n 20 --level warning
    journeywork logs --json                one JSON object a line

Services write JSON lines; NATS and vLLM write their own formats, whose times are read too. A line without a time (of a
traceback, for example) belongs to the line before it. A file that is rotated or truncated is followed by its name.
"""

from __future__ import annotations

import argparse
import heapq
import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
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
_BLOCK = 64 * 1024
_NATS = re.compile(r"\[\d+\] (\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d+) \[(\w{3})\] (.*)")
_VLLM = re.compile(r"(?:\([^)]*\) )*(DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d-\d\d \d\d:\d\d:\d\d) (.*)")
_NATS_LEVELS = {"WRN": "warning", "ERR": "error", "FTL": "critical", "DBG": "debug", "TRC": "debug"}
_KNOWN = ("at", "level", "service", "logger", "event", "exception")


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
    """The entry of a line. `before` is the entry above it, from which a line without a time takes time and level."""
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
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    if not isinstance(found, dict) or not isinstance(at := found.get("at"), int | float):
        return None
    text = str(found.get("event", ""))
    if trace := found.get("exception"):
        text += f"\n{trace}"
    others = {name: value for name, value in found.items() if name not in _KNOWN}
    return Entry(float(at), service, str(found.get("level", "info")), text, others)


def _without_year(text: str, before: Entry | None) -> float:
    """The time of `month-day hour:minute:second`: this year's, or last year's where that would lie in the future."""
    now = datetime.now()
    at = datetime.strptime(f"{now.year}-{text}", "%Y-%m-%d %H:%M:%S")
    if at.timestamp() > now.timestamp() + 86_400:
        at = at.replace(year=now.year - 1)
    # Whole seconds only: a line is not before the one above it.
    return max(at.timestamp(), before.at) if before is not None else at.timestamp()


class LogFile:
    """One file, which may not exist yet and may be replaced while it is read."""

    def __init__(self, path: Path) -> None:
        self.path, self.service = path, path.name.removesuffix(".log")
        self._file: IO[bytes] | None = None
        self._rest = b""
        self._last: Entry | None = None

    def skip_to_last(self, lines: int) -> None:
        """Leave out all but the last `lines` lines."""
        if not self._open():
            return
        assert self._file is not None
        at, found = self._file.seek(0, os.SEEK_END), 0
        while at > 0:
            size = min(_BLOCK, at)
            at -= size
            self._file.seek(at)
            block = self._file.read(size)
            found += block.count(b"\n")
            if found > lines:
                for _ in range(found - lines):
                    cut = block.find(b"\n") + 1
                    at, block = at + cut, block[cut:]
                break
        self._file.seek(at)

    def skip_to(self, offset: int) -> None:
        """Leave out what lies before byte `offset`."""
        if self._open():
            assert self._file is not None
            self._file.seek(offset)

    def entries(self) -> Iterator[Entry]:
        """The complete lines from where the last call ended, also those of the file that took its name."""
        while True:
            if self._file is None and not self._open():
                return
            assert self._file is not None
            while block := self._file.read(_BLOCK):
                *whole, self._rest = (self._rest + block).split(b"\n")
                yield from self._parsed(whole)
            if not self._replaced():
                return
            yield from self._parsed([self._rest] if self._rest else [])
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._rest = None, b""

    def _parsed(self, lines: Iterable[bytes]) -> Iterator[Entry]:
        for line in lines:
            if text := line.decode("utf-8", "replace").rstrip():
                self._last = parse(text, self.service, self._last)
                yield self._last

    def _open(self) -> bool:
        try:
            self._file = self.path.open("rb")
        except FileNotFoundError:
            return False
        return True

    def _replaced(self) -> bool:
        """Whether the name stands for another file now, or the file was cut to less than what was read of it."""
        assert self._file is not None
        try:
            named = self.path.stat()
        except FileNotFoundError:
            return False  # between two steps of a rotation
        return named.st_ino != os.fstat(self._file.fileno()).st_ino or named.st_size < self._file.tell()


class Logs:
    """The log files of a run."""

    def __init__(self, folder: Path, services: Sequence[str] = ()) -> None:
        """Raises `ConfigError` where a service has no log in `folder`."""
        self._folder, self._services = folder, services
        self._files: dict[Path, LogFile] = {}
        self._find()
        present = [path.stem for path in folder.glob("*.log")]
        if missing := [s for s in services if s not in present]:
            raise ConfigError(
                f"{folder} has no log of {', '.join(missing)}; there are: {', '.join(sorted(present)) or 'none'}"
            )

    def _find(self) -> None:
        for path in sorted(self._folder.glob("*.log")):
            if path not in self._files and (not self._services or path.stem in self._services):
                self._files[path] = LogFile(path)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def skip_to_last(self, lines: int) -> None:
        """Leave out all but the last `lines` lines of each file."""
        for file in self._files.values():
            file.skip_to_last(lines)

    def entries(self) -> Iterator[Entry]:
        """What the files hold, in the order of time."""
        return heapq.merge(*(file.entries() for file in self._files.values()), key=lambda entry: entry.at)

    def news(self) -> list[Entry]:
        """What was written since the last call, also to files that are new, in the order of time."""
        self._find()
        return sorted(self.entries(), key=lambda entry: entry.at)


def errors(path: Path, offset: int, most: int = 5) -> list[str]:
    """Return the first line of each error from byte `offset` of a log on, the newest `most` of them."""
    file = LogFile(path)
    file.skip_to(offset)
    try:
        found = [e for e in file.entries() if e.level in ("error", "critical")]
    finally:
        file.close()
    lines = [shown(replace(e, text=e.text.partition("\n")[0]), 0).plain for e in found[-most:]]
    return [line.partition(f"{file.service} ")[2] for line in lines]


def shown(entry: Entry, width: int) -> Text:
    """An entry as a line: time, service (padded to `width`), text and fields."""
    at = datetime.fromtimestamp(entry.at, UTC).strftime("%H:%M:%S.%f")[:-3] if entry.at else " " * 12
    line = Text(f"{at} ", style="dim")
    line.append(f"{entry.service:<{width}} ", style="cyan")
    line.append(visible(entry.text), style=_STYLES.get(entry.level, ""))
    for name, value in entry.fields.items():
        said = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        line.append(f" {name}=", style="dim").append(visible(said))
    return line


def as_json(entry: Entry) -> str:
    """An entry as one JSON object."""
    record = {
        "at": entry.at,
        "service": entry.service,
        "level": entry.level,
        "event": entry.text,
        **entry.fields,
    }
    return msgspec.json.encode(record).decode()


async def show(logs: Logs, args: argparse.Namespace, console: Console) -> None:
    """Print what the files hold, and with `--follow` what is written to them, until cancelled."""
    floor = LEVELS.index(args.level)

    def wanted(entries: Iterable[Entry]) -> Iterator[Entry]:
        return (e for e in entries if e.level not in LEVELS or LEVELS.index(e.level) >= floor)

    def write(entries: Iterable[Entry]) -> None:
        for entry in entries:
            if args.json:
                sys.stdout.write(as_json(entry) + "\n")
            else:
                console.print(shown(entry, 10), soft_wrap=True)
        sys.stdout.flush()

    if args.lines is not None and args.level == LEVELS[0]:
        logs.skip_to_last(args.lines)
    entries = wanted(logs.entries())
    write(entries if args.lines is None else deque(entries, maxlen=args.lines))
    while args.follow:
        await anyio.sleep(_POLL_S)
        write(wanted(await anyio.to_thread.run_sync(logs.news)))


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
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), 1
        )  # nobody reads: Python would complain when it flushes at its exit
    finally:
        logs.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
