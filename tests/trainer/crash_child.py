"""Runs the trainer in forked processes that die, as by `kill -9`, at a chosen point of the commit protocol.

Reads one line per life from standard input, `<config.toml> <point> <nth> <longest>`, and answers with the process's
exit code: 9 if it died there, 0 if it reached `max_steps` first. Memory does not hold a sequence of more than `longest`
tokens. The fork saves each life the import of PyTorch.
"""

import os
import sys
import traceback
from typing import Any

import anyio
import torch

from pipeline import crash, streams
from pipeline.config import load
from tests.kits.quick_service import quick_consumers
from trainer import service
from trainer.batches.packing import MicroBatch
from trainer.engine.passes import Passes
from trainer.learner import Learner, PendingStep

DIED = 9
POINTS = (
    "trainer.before_rename",
    "trainer.after_checkpoint",
    "trainer.between_uploads",
    "trainer.after_upload",
    "trainer.after_publish",
    "committed",
)
"""Those of the commit (`pipeline.crash`), and where the step is the current one."""


def _instrument(point: str, nth: int) -> None:
    """Die at the nth passage of `point`."""
    left = nth
    make_current = Learner.make_current

    def passed(here: str) -> None:
        nonlocal left
        if here == point:
            left -= 1
            if left <= 0:
                os._exit(DIED)

    def committed(self: Learner, pending: PendingStep) -> None:
        make_current(self, pending)
        passed("committed")

    crash.point, Learner.make_current = passed, committed  # type: ignore[method-assign]


def _limit(longest: int) -> None:
    """Memory that does not hold a sequence of more tokens."""
    original = Passes._backward

    def limited(self: Passes, batch: MicroBatch, *args: Any) -> None:
        if batch.layout.ids_RL.shape[1] > longest:
            raise torch.OutOfMemoryError("too much")
        original(self, batch, *args)

    Passes._backward = limited  # type: ignore[method-assign]


def _live(config_path: str, point: str, nth: int) -> None:
    _instrument(point, nth)
    streams.CONSUMERS = quick_consumers()
    anyio.run(service.train, load(config_path), lambda **_: None)


def main() -> None:
    for line in sys.stdin:
        config, point, nth, longest = line.split()
        pid = os.fork()
        if pid == 0:
            try:
                _limit(int(longest))
                _live(config, point, int(nth))
                os._exit(0)
            except BaseException:  # noqa: BLE001 - a forked child must never return into the parent's loop
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
