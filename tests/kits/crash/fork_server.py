"""A fork server for the crash matrix: it has imported every service, so that a trainer starts in milliseconds instead
of ten seconds.

    python -m tests.kits.crash.fork_server ACK_WAIT_S [SERVICE | MODULE …]

It reads a JSON line for each process to start on stdin, `{"id": 3, "service": "judge", "config": …, "crash":
"judge.before_publish:2"}`. The process itself answers `{"id": 3, "ready": true}`, and the fork server `{"id": 3,
"status": …}` once it has ended (a signal's number, negative). The line `{"id": 3, "signal": 9}` sends a signal to a
process that has not ended. Only the fork server can do so safely: it decides when a process is reaped, so the process
id can't be another's. The end of stdin kills all processes."""

from __future__ import annotations

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
from tests.kits.quick_service import quick_consumers

ACK_WAIT_S = 0.6
SERVICES = ("gateway", "sampler", "judge", "trainer", "store")


def tell(**facts: int | bool) -> None:
    """Write one line in one write: the fork server and its processes share the pipe."""
    os.write(1, json.dumps(facts).encode() + b"\n")


def serve(order: dict[str, Any]) -> None:
    """Run a service until a signal or its stop point ends it."""
    name = order["service"]
    config = configuration.load(order["config"])
    log.configure(name, "WARNING", config.path(f"{name}.log").open("a"))
    streams.CONSUMERS = quick_consumers(float(sys.argv[1]), endless=True)
    if name == "store":
        # Where one is due after 100 commits, the stop point would be passed too rarely.
        importlib.import_module("store.lake.maintenance")._CHECKPOINT_EVERY = 3  # type: ignore[attr-defined]
    crash.arm(order["crash"])

    def ready(**_: str | int | float) -> None:
        tell(id=order["id"], ready=True)

    entry = importlib.import_module(f"{plan.SERVICES[name]}.service").serve
    anyio.run(service.until_signalled, entry, config, ready, backend_options={"use_uvloop": True})


def fork(order: dict[str, Any]) -> int:
    """Start a process; return its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.close(0)
        serve(order)
    except BaseException:  # noqa: BLE001 - a forked process must not return into the loop of its parent
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def main() -> None:
    for name in sys.argv[2:] or SERVICES:
        importlib.import_module(f"{plan.SERVICES[name]}.service" if name in plan.SERVICES else name)
    tell(id=0, ready=True)
    alive: dict[int, int] = {}
    """Descriptor of a process to the id in its order."""
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
                        alive[os.pidfd_open(fork(order))] = order["id"]
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
