"""A program that says what it was given, and ends as it is told: with a status, or by waiting for a signal."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    _, how, *handles = sys.argv
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    facts = {
        "argv": sys.argv[1:],
        "command": Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0")[:-1],
        "environment": sorted(
            set(Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")) - {""}
        ),
        "file": __file__,
        "name": __spec__.name,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "modules": len(sys.modules),
        "group": os.getpgid(0) == os.getpid(),
        "session": os.getsid(0) == os.getpid(),
        "cwd": str(Path.cwd()),
        "path": sys.path[:2],
        "variable": os.environ.get("VARIABLE"),
        "stdin": sys.stdin.read(),
        "open": [fd for fd in range(500) if Path(f"/proc/self/fd/{fd}").exists()],
        "cores": sorted(os.sched_getaffinity(0)),
        "handlers": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
        "threads": threading.active_count(),
        "capabilities": {name: int(text, 16) for name, text in status.items() if name.startswith("Cap")},
        "identity": [os.getuid(), int(status["NoNewPrivs"])],
    }
    atexit.register(print, "at exit")
    for handle in handles:
        os.write(int(handle), json.dumps(facts).encode() + b"\n")
    sys.stderr.write("to stderr\n")
    if how == "wait":
        sys.stdout.write("waits\n")
        sys.stdout.flush()
        signal.pause()
    if how == "fail":
        raise ValueError("as told")
    sys.exit(how if how.startswith("say") else int(how))
