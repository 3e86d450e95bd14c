"""Services for the crash matrix, each a process of its own, forked from one that has imported everything: a life of
the trainer begins in milliseconds instead of ten seconds.

Reads a JSON line per life on stdin, `{"id": 3, "service": "judge", "config": …, "crash": "judge.before_publish:2"}`.
Answers `{"id": 3, "ready": true}` from the life itself, and `{"id": 3, "status": …}` once it is over (a signal's
number, negative). The line `{"id": 3, "signal": 9}` sends a signal to a life that is not over. Only this process can
do so safely: it decides when a life is reaped, so the process id can't be another's. The end of stdin kills all
lives."""

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
from pipeline import crash, streams
from pipeline.running import plan, service
from pipeline.telemetry import logs as log

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
    anyio.run(service.until_signalled, serve, config, ready, backend_options={"use_uvloop": True})


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


def begin(life: dict[str, Any]) -> int:
    """Return a descriptor of the new life's process."""
    return os.pidfd_open(fork(life))


def main() -> None:
    for name in SERVICES:
        importlib.import_module(f"{plan.SERVICES[name]}.service")
    tell(id=0, ready=True)
    alive: dict[int, int] = {}
    """Descriptor of a life's process to the life's id."""
    buffer, more = b"", True
    while more or alive:
        readable, _, _ = select.select([*([0] if more else []), *alive], [], [])
        for fd in readable:
            if fd == 0:
                data = os.read(0, 65536)
                more = bool(data)
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    order = json.loads(line)
                    if "signal" not in order:
                        alive[begin(order)] = order["id"]
                        continue
                    for process, number in alive.items():
                        if number == order["id"]:
                            signal.pidfd_send_signal(process, order["signal"])
                for process in [] if more else alive:
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            elif ended := os.waitid(os.P_PIDFD, fd, os.WEXITED):
                os.close(fd)
                killed = ended.si_code != os.CLD_EXITED
                tell(id=alive.pop(fd), status=-ended.si_status if killed else ended.si_status)


if __name__ == "__main__":
    main()
