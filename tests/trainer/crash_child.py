"""Runs the trainer in forked processes that die, as by `kill -9`, at a chosen point of the commit protocol.

Reads one line per life from standard input, `<config.toml> <point> <nth> <longest>`, and answers with the process's
exit code: 9 if it died there, 0 if it reached `max_steps` first. Memory does not hold a sequence of more than `longest`
tokens. The fork saves each life the import of PyTorch.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import anyio
import torch

from pipeline import streams
from pipeline.config import load
from pipeline.events import CheckpointPublished
from pipeline.log.broker import Broker, Delivery
from tests.kits.quick_service import quick_consumers
from trainer import service
from trainer.batches.packing import MicroBatch
from trainer.checkpoints import checkpoint
from trainer.engine.passes import Passes
from trainer.learner import Learner

DIED = 9
POINTS = ("file", "written", "uploaded", "published", "committed")


def _instrument(point: str, nth: int) -> None:
    left = nth

    def passed(here: str) -> None:
        nonlocal left
        if point in (here, "any"):
            left -= 1
            if left <= 0:
                os._exit(DIED)

    def after(owner: Any, name: str, here: str, counts: Callable[..., bool] = lambda *_, **__: True) -> None:
        original = getattr(owner, name)

        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            out = await original(*args, **kwargs)
            if counts(*args, **kwargs):
                passed(here)
            return out

        def wrapped_sync(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            if counts(*args, **kwargs):
                passed(here)
            return out

        is_async = original.__code__.co_flags & 0x80
        setattr(owner, name, wrapped if is_async else wrapped_sync)

    after(checkpoint, "write_whole", "file", lambda *_, durable=False: durable)
    after(checkpoint.Checkpoints, "write", "written")
    after(Broker, "put_object", "uploaded")
    after(Broker, "publish", "published", lambda _, event, *__, **___: isinstance(event, CheckpointPublished))
    after(Learner, "commit", "committed")
    after(Delivery, "ack", "acked")


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
