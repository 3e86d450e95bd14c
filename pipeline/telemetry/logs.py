"""Structured logs: one JSON object a line on stderr.

`get_logger(name).info("adapter loaded", version="m@3", ms=12)` writes
`{"at": "2026-11-22T09:30:12.345Z", "level": "info", "service": …, "event": "adapter loaded", "version": "m@3",
"ms": 12}`.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import msgspec

_encoder = msgspec.json.Encoder(enc_hook=str)
_service = "journeywork"
_ALWAYS = ("at", "level", "service", "logger", "event", "exception")
"""Fields of every line, and the traceback of one with an exception. All others are a line's own."""
_MOST_ERRORS = 5
"""Error lines of a service that are shown."""


class _JsonFormatter(logging.Formatter):
    """Makes a line of JSON of a record. Records of `Logger` have their keyword arguments in `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line: the fields that every one has (`_ALWAYS`), then its own."""
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z",
            "level": record.levelname.lower(),
            "service": _service,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encoder.encode(line).decode()


class Logger:
    """A logger. Keyword arguments become fields of the line."""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(name)

    def _emit(self, level: int, event: str, fields: dict[str, Any], exc: BaseException | None = None) -> None:
        """Log `event`, a constant text, with its fields, and with the traceback of `exc`."""
        if self._log.isEnabledFor(level):
            self._log.log(level, "%s", event, extra={"fields": fields}, exc_info=exc)

    # Each method logs `event`, a constant text, with its fields, and with the traceback of `exc`, at its level.

    def debug(self, event: str, **fields: Any) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, exc: BaseException | None = None, **fields: Any) -> None:
        self._emit(logging.WARNING, event, fields, exc)

    def error(self, event: str, exc: BaseException | None = None, **fields: Any) -> None:
        self._emit(logging.ERROR, event, fields, exc)


def get_logger(name: str) -> Logger:
    """Return the logger of the module `name`."""
    return Logger(name)


def configure(service: str, level: str = "INFO", sink: TextIO | None = None) -> None:
    """Send this process's logs to `sink` (stderr where none is given) as JSON lines, named `service`."""
    global _service
    _service = service
    handler = logging.StreamHandler(sink or sys.stderr)
    handler.setFormatter(_JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # A log line for each request would cost more than its capture.
    for noisy in ("httpx", "httpcore", "LiteLLM", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def error_lines(path: Path, offset: int) -> tuple[str, ...]:
    """Return the event and the fields of each error line from byte `offset` of a service's log on, the newest
    `_MOST_ERRORS` of them. The supervisor shows them."""
    lines = []
    for line in _lines(path, offset):
        with suppress(msgspec.DecodeError, KeyError, TypeError):  # another program's line, or the half of one
            record = msgspec.json.decode(line)
            if record["level"] == "error":
                fields = [f"{name}={value}" for name, value in record.items() if name not in _ALWAYS]
                lines.append(" ".join([record["event"], *fields]))
    return tuple(lines[-_MOST_ERRORS:])


def last_plain_line(path: Path, offset: int) -> str:
    """Return the last line from byte `offset` of a log on that is no JSON, such as that of a traceback; empty if there
    is none."""
    texts = [line.decode(errors="replace").strip() for line in _lines(path, offset) if not line.startswith(b"{")]
    return next((text[:300] for text in reversed(texts) if text), "")


def _lines(path: Path, offset: int) -> list[bytes]:
    """Return the lines of a file from byte `offset` on; none if it does not exist."""
    return path.read_bytes()[offset:].splitlines() if path.exists() else []
