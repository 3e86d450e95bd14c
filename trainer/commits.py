"""Where disk and log meet: publishing a step, and finding out at start how far the last life got.

A step is on disk first, then its adapter in the object store, then its event on the log. So at start the disk is either
level with the log, one step ahead (publish it), or behind or empty (rebuild from the log). Anything else is another
log's training, and nothing is touched.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar, TypeVarTuple

import anyio
import anyio.to_thread
import nats.errors
import nats.js.errors

from pipeline import crash, streams
from pipeline.broker import Broker, BrokerUnavailableError
from pipeline.config import Config
from pipeline.events import CheckpointPublished
from pipeline.log import get_logger
from pipeline.signing import Signer, Trust
from trainer.checkpoint import CheckpointError, Manifest
from trainer.learner import Learner

log = get_logger("trainer.commits")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class TrainerError(Exception):
    """Something an operator has to look at; the message says what."""


class Commits:
    """See the module."""

    def __init__(self, broker: Broker, config: Config) -> None:
        self.broker, self.config = broker, config
        self._computing = anyio.CapacityLimiter(1)
        self._signer, self._trust = Signer.of(config), Trust(config.signing)

    def trusted(self, event: CheckpointPublished) -> bool:
        """Whether a checkpoint of the log may be gone on from: an unsigned one was not written by a trainer."""
        objection = self._trust.objection(event)
        if objection:
            log.error("checkpoint refused", reason=objection)
        return not objection

    async def recover(self, learner: Learner, last: CheckpointPublished | None) -> tuple[int, ...]:
        """Bring `learner` to its newest committed step; `last` is the newest on the log. A checkpoint on disk whose event
        a crash kept back is published: the stream sequences of its groups are returned.

        Raises `TrainerError` where disk and log tell different stories."""
        stored = await self.in_thread(learner.stored)
        known = last.step if last else 0
        if stored is not None and stored.step == known + 1:
            if stored.parent != (last.version if last else f"{learner.model.name}@0"):
                raise TrainerError(
                    f"{stored.version} on disk continues {stored.parent}, which the log does not know"
                )
            await self.in_thread(self._check_parent, learner, last)
            await self.publish(stored, await self.in_thread(learner.tar_of, stored.step))
            await self.in_thread(learner.resume, stored.step)
            log.info("published a checkpoint that a crash kept back", version=stored.version)
            return stored.group_seqs
        if stored is not None and stored.step > known + 1:
            raise TrainerError(
                f"{learner.checkpoints.folder} holds step {stored.step}, but the log's newest is {known}: this is "
                "another log's training. Point nats.url at the log it belongs to, or use a fresh run_dir."
            )
        if last is not None:
            try:
                manifest, _ = await self.in_thread(learner.checkpoints.read, last.step)
                on_disk = manifest.adapter_sha256 == last.adapter_sha256
            except CheckpointError as error:
                log.warning("no usable checkpoint on disk", version=last.version, reason=str(error))
                on_disk = False
            if on_disk:
                await self.in_thread(learner.resume, last.step)
            else:
                tar = await self.broker.get_object(streams.ADAPTERS_BUCKET, last.adapter)
                await self.in_thread(learner.rebuild, last, tar)
        return ()

    @staticmethod
    def _check_parent(learner: Learner, last: CheckpointPublished | None) -> None:
        """The parent, where it is still on disk too, must be what the log holds under its name."""
        if last is None or last.step not in learner.checkpoints.steps():
            return
        manifest, _ = learner.checkpoints.read(last.step)
        if manifest.adapter_sha256 != last.adapter_sha256:
            raise TrainerError(
                f"{last.version} on disk is not the one in the log: this is another log's training. Point nats.url at "
                "the log it belongs to, or use a fresh run_dir."
            )

    async def publish(self, manifest: Manifest, tar: bytes) -> None:
        """Adapter to the object store, then the event; safe to repeat. Raises `TrainerError` where the log holds another
        step of that number."""
        crash.point("trainer.after_checkpoint")
        await self.persist(partial(self.broker.put_object, streams.ADAPTERS_BUCKET, manifest.adapter, tar))
        crash.point("trainer.after_upload")
        event = manifest.event()
        if self._signer is not None:
            event = self._signer.sign(event)
        ack = await self.broker.publish(event, headers=manifest.trace)
        crash.point("trainer.after_publish")
        if ack.duplicate:
            there = (await self.broker.get("POLICY", ack.seq)).event
            if not isinstance(there, CheckpointPublished) or there.adapter_sha256 != event.adapter_sha256:
                raise TrainerError(
                    f"the log already holds another {manifest.version}: does a second trainer run on project "
                    f"{manifest.project!r}? Stop it; this one resumes from the log when it starts again."
                )

    async def persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """`call` again and again while the server is away, as long as a publish would be."""
        deadline = anyio.current_time() + self.config.nats.publish_deadline_s
        while True:
            try:
                return await call()
            except (BrokerUnavailableError, nats.errors.Error, TimeoutError) as error:
                if anyio.current_time() > deadline or isinstance(error, nats.js.errors.BadRequestError):
                    raise
                log.warning("the log does not answer", error=str(error) or type(error).__name__)
                await anyio.sleep(0.2)  # paces the retry of a server that is away

    async def in_thread(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        """Compute off the event loop, one thing at a time, so that heartbeats keep held groups alive."""
        return await anyio.to_thread.run_sync(call, *args, limiter=self._computing)
