"""Where disk and log meet: publishing a step, and finding out at start how far the last life got.

A step is on disk first, then its adapter in the object store, then its event on the log. So at start the disk is level with the
log, ahead of it (by one step after a crash, by several after a power cut that took the log's end: publish them in order), or
behind or empty (rebuild from the log). What does not continue the log is another log's training, and nothing is touched.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

from pipeline import crash, streams
from pipeline.config import Config
from pipeline.events import CheckpointPublished, checkpoint_subject
from pipeline.log import retry
from pipeline.log.broker import Broker
from pipeline.security.signing import Signer, Trust
from pipeline.telemetry.logs import get_logger
from trainer.checkpoints.checkpoint import CheckpointError, Manifest
from trainer.learner import Learner

log = get_logger("trainer.checkpoints.commits")

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

    async def recover(self, learner: Learner, last: CheckpointPublished | None) -> list[Manifest]:
        """Bring `learner` to its newest committed step; `last` is the newest on the log.

        What the disk holds beyond `last` is published, in order, and returned: one checkpoint after a crash, several after a
        power cut that took the end of the log. Raises `TrainerError` where disk and log tell different stories."""
        stored = await self.in_thread(learner.stored)
        log_name = await self._log_name()
        known = last.step if last else 0
        if stored is not None and stored.step > known:
            ahead = await self.in_thread(self._beyond, learner, last, log_name)
            for manifest in ahead:
                await self.publish(manifest, await self.in_thread(learner.tar_of, manifest.step))
                log.warning("published a checkpoint that the log did not hold", version=manifest.version)
            await self.in_thread(learner.resume, ahead[-1].step)
        else:
            ahead = []
            if last is not None:
                await self._go_on_from(learner, last)
        await self.in_thread(learner.checkpoints.set_log_name, log_name)
        return ahead

    async def mend(self, learner: Learner) -> None:
        """Publish again what a power cut of the log's machine took while this trainer lived: the newest committed step and
        what the disk holds before it."""
        step = learner.state.step
        branch = self.config.trainer.branch
        subject = checkpoint_subject(self.config.project, learner.model.name, str(step), branch)
        if not step or await self.persist(partial(self.broker.last, "POLICY", subject)) is not None:
            return
        every = checkpoint_subject(self.config.project, learner.model.name, branch=branch)
        held = await self.persist(partial(self.broker.history, "POLICY", every))
        events = [r.event for r in held if isinstance(r.event, CheckpointPublished) and self.trusted(r.event)]
        last = max((e for e in events if e.step <= step), key=lambda e: e.step, default=None)
        log_name = await self._log_name()
        for manifest in await self.in_thread(self._beyond, learner, last, log_name):
            if manifest.step <= step:
                await self.publish(manifest, await self.in_thread(learner.tar_of, manifest.step))
                log.warning("published a checkpoint that the log lost", version=manifest.version)

    async def _log_name(self) -> str:
        """Tells one log from another: a server's restart keeps when the stream was made, also after a power cut."""
        info = await self.broker.stream_info("POLICY")
        if info.created is None:
            raise TrainerError(
                "the NATS server does not say when POLICY was made: it is too old, use 2.11 or newer"
            )
        return str(info.created.isoformat())

    async def _go_on_from(self, learner: Learner, last: CheckpointPublished) -> None:
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

    def _beyond(self, learner: Learner, last: CheckpointPublished | None, log_name: str) -> list[Manifest]:
        """What the disk holds beyond the log's newest step, oldest first. Raises `TrainerError` where it does not continue
        this log."""
        known = last.step if last else 0
        ahead: list[Manifest] = []
        shared = False
        for step in learner.checkpoints.steps():
            if step < known:
                continue
            try:
                manifest, _ = learner.checkpoints.read(step)
            except CheckpointError as error:
                log.error("checkpoint passed over", reason=str(error))
                continue
            if step > known:
                ahead.append(manifest)
            elif last is not None:
                if manifest.adapter_sha256 != last.adapter_sha256:
                    raise self._another(learner, f"{last.version} on disk is not the one in the log")
                shared = True
        noted = learner.checkpoints.log_name()
        joined = ahead[0].step == known + 1
        if joined and ahead[0].parent != (last.version if last else f"{learner.model.name}@0"):
            raise self._another(
                learner, f"{ahead[0].version} on disk continues {ahead[0].parent}, which is not in the log"
            )
        # The log is this training's if it is the one that was noted or its newest step is on the disk. Where neither is known,
        # only one step may be ahead: that is a crash between disk and log.
        if noted != log_name and not shared and (noted or len(ahead) > 1 or not joined):
            raise self._another(learner, f"the disk holds step {ahead[-1].step}, the log's newest is {known}")
        if not joined:
            log.error(
                "steps lost", model=learner.model.name, first=known + 1, last=ahead[0].step - 1,
                detail="neither the log nor the disk holds them; training goes on from what the disk holds",
            )  # fmt: skip
        return ahead

    @staticmethod
    def _another(learner: Learner, why: str) -> TrainerError:
        return TrainerError(
            f"{why}: {learner.checkpoints.folder} is another log's training. Point nats.url at the log it belongs to, or "
            "use a fresh run_dir."
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
            found = await self.broker.last("POLICY", event.subject())
            if found is None:  # the server remembers the id of an event that a power cut took
                again = f"{event.message_id()}/again/{ack.seq}"
                ack = await self.broker.publish(event, headers=manifest.trace, message_id=again)
                found = await self.broker.get("POLICY", ack.seq)
            there = found.event
            if not isinstance(there, CheckpointPublished) or there.adapter_sha256 != event.adapter_sha256:
                raise TrainerError(
                    f"the log already holds another {manifest.version}: does a second trainer run on project "
                    f"{manifest.project!r}? Stop it; this one resumes from the log when it starts again."
                )

    async def persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """`call`, repeated while the log is away, as long as a publish would be; see `pipeline.log.retry`."""
        return await retry.patiently(call, "the log did not answer", self.config.nats.publish_deadline_s)

    async def in_thread(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        """Compute off the event loop, one thing at a time, so that heartbeats keep held groups alive."""
        return await anyio.to_thread.run_sync(call, *args, limiter=self._computing)
