"""Services for the crash matrix, each a process of its own, forked from one that has imported everything: a life of the trainer
begins in milliseconds instead of ten seconds.

Reads a JSON line per life on stdin, `{"id": 3, "service": "judge", "config": …, "crash": "judge.before_publish:2"}`. Answers
`{"id": 3, "pid": …}`, then `{"id": 3, "ready": true}` from the life itself, and `{"id": 3, "status": …}` once it is over (a signal's
number, negative).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import select
import signal
import sys
import traceback
from typing import Any

import anyio

from pipeline import config as configuration
from pipeline import crash, log, plan, service, streams

ACK_WAIT_S = 0.6
SERVICES = ("gateway", "judge", "trainer", "store")


def quick_consumers() -> tuple[streams.ConsumerSpec, ...]:
    """The real ones, but what a dead process held comes again at once; and no redelivery makes a dead letter here."""
    return tuple(
        dataclasses.replace(c, ack_wait_s=ACK_WAIT_S, max_deliver=1_000_000) for c in streams.CONSUMERS
    )


def tell(**facts: int | bool) -> None:
    """One line in one write: lives and nursery share the pipe."""
    os.write(1, json.dumps(facts).encode() + b"\n")


def live(life: dict[str, Any]) -> None:
    name = life["service"]
    config = configuration.load(life["config"])
    log.configure(name, "WARNING", config.path(f"{name}.log").open("a"))
    streams.CONSUMERS = quick_consumers()
    crash.arm(life["crash"])

    def ready(**_: str | int | float) -> None:
        tell(id=life["id"], ready=True)

    serve = importlib.import_module(f"{plan.SERVICES[name]}.service").serve
    anyio.run(service._until_signalled, serve, config, ready, backend_options={"use_uvloop": True})


def fork(life: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.close(0)
        live(life)
    except BaseException:  # noqa: BLE001 - a forked life must not return into the loop of its parent
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def main() -> None:
    for name in SERVICES:
        importlib.import_module(f"{plan.SERVICES[name]}.service")
    tell(id=0, ready=True)
    alive: dict[int, tuple[int, int]] = {}
    buffer, more = b"", True
    while more or alive:
        readable, _, _ = select.select([*([0] if more else []), *alive], [], [])
        for fd in readable:
            if fd == 0:
                data = os.read(0, 65536)
                more = bool(data)
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    life = json.loads(line)
                    pid = fork(life)
                    alive[os.pidfd_open(pid)] = (life["id"], pid)
                    tell(id=life["id"], pid=pid)
            else:
                number, pid = alive.pop(fd)
                os.close(fd)
                _, status = os.waitpid(pid, 0)
                tell(id=number, status=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
