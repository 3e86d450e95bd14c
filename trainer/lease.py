"""The lease of a branch: one trainer trains a branch at a time, and others wait until it ends. `trainer.service` takes
it before training and keeps it meanwhile.

The trainer that trains holds a value in the key-value bucket `FLEET` of the log, and renews it. If it dies, the value
expires after `_TTL_S`, and a trainer that waits takes it. The value names the file that the trainer has locked, in the
folder of its checkpoints: a trainer that is started again there after a crash takes the value at once, because the lock
of a file ends with its process, and no two processes have the same lock.

A trainer that stood still for longer than `_TTL_S` may go on while another one trains. It can't commit a step twice:
the log takes one checkpoint of each number (`trainer.checkpoints.commits`).
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Self

import anyio

from pipeline import streams
from pipeline.config import Config
from pipeline.files import try_lock
from pipeline.log import key_value
from pipeline.log.broker import Broker, BrokerError
from pipeline.names import subject_token
from pipeline.telemetry.logs import get_logger
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.commits import TrainerError

logger = get_logger("trainer.lease")

_TTL_S = 10.0
"""Seconds after which a lease that is not renewed expires."""
_RENEW_S = 3.0
"""Seconds between two renewals."""
_POLL_S = 1.0
"""Seconds between two attempts of a waiting trainer to take the lease."""
_LOCK = "trainer.lock"


class Lease:
    """The right to train the branch of the settings. Use it in a `with` block, at whose end the file is unlocked.
    `broker` must outlive it; `user` is its NATS user."""

    def __init__(self, broker: Broker, config: Config, user: str) -> None:
        self._broker = broker
        self._key = f"{user}.{subject_token(config.project)}.{subject_token(config.trainer.branch)}"
        folder = Checkpoints.of(config, config.models[0].name).folder.parent
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / _LOCK).open("a")
        # The lease's holder, by the boot of its machine, and device and inode of its lock: no other file has all three.
        file, boot = os.fstat(self._file.fileno()), Path("/proc/sys/kernel/random/boot_id").read_text()
        self._value = f"{boot.strip()} {file.st_dev} {file.st_ino}".encode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    async def take(self) -> bool:
        """Take the lease if no other trainer has it; renew it if this one has it. Returns whether this one has it."""
        return try_lock(self._file) and await key_value.take(
            self._broker, streams.FLEET.name, self._key, self._value, _TTL_S
        )

    async def wait(self) -> None:
        """Wait until this trainer has the lease."""
        while not await self.take():  # noqa: ASYNC110 - the lock of a file can only be tried
            await anyio.sleep(_POLL_S)

    async def keep(self) -> None:
        """Renew the lease until cancelled. Raises `TrainerError` if another trainer took it."""
        while True:
            await anyio.sleep(_RENEW_S)
            try:
                if not await self.take():
                    raise TrainerError(
                        "another trainer trains this branch: this one did not answer for some seconds. It waits at its "
                        "next start"
                    )
            except BrokerError as error:
                logger.warning("the lease was not renewed", reason=str(error))

    async def release(self) -> None:
        """Give up the lease if this trainer has it, so that a waiting trainer can take it at once. A log that does not
        answer is no error: the lease runs out."""
        with anyio.move_on_after(_POLL_S, shield=True), suppress(BrokerError):
            if await self.take():  # else it is another one's
                await key_value.delete(self._broker, streams.FLEET.name, self._key)
