"""Store processes for the crash matrix, forked from one that has imported everything: a life takes milliseconds to
begin.

Reads a JSON line per life on stdin, `{"url": …, "run_dir": …, "crash": "store.after_commit:2"}`; answers `{"pid":
…}` and, once it is over, `{"status": …}` (a signal's number, negative).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import Any

import anyio

from pipeline import crash, streams
from pipeline.config import Config, NatsConfig, StoreConfig
from pipeline.running import service
from store.service import serve
from tests.kits.quick_service import quick_consumers

ACK_WAIT_S = 0.3


def live(life: dict[str, Any]) -> None:
    streams.CONSUMERS = quick_consumers(ACK_WAIT_S, endless=True)
    crash.arm(life["crash"])
    config = Config(
        run_dir=life["run_dir"],
        nats=NatsConfig(url=life["url"], ack_timeout_s=1.0),
        store=StoreConfig(flush_rows=life["flush_rows"], flush_s=0.03, **life.get("store", {})),
    )

    def ready(**_: str | int | float) -> None:
        pass

    anyio.run(service.until_signalled, serve, config, ready)


def tell(**facts: int) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main() -> None:
    for line in sys.stdin:
        life = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                live(life)
            except BaseException:  # noqa: BLE001 - a forked life must not return into the loop below
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        tell(pid=pid)
        _, status = os.waitpid(pid, 0)
        tell(status=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
