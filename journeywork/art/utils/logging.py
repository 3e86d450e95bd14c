"""ART's lines on the terminal: a time, a kind and a message on standard output."""

from __future__ import annotations

import sys
from datetime import datetime
from functools import partial


def _write(kind: str, msg: object) -> None:
    sys.stdout.write(f"[{datetime.now():%H:%M:%S}] {kind:<5} {msg}\n")


info, step, ok, warn, err = (partial(_write, kind) for kind in ("INFO", "STEP", "OK", "WARN", "ERR"))
