"""The commit protocol between disk and log: publishing a step, and recovery at start.

A step is written to disk first, then its adapter to the object store, then its event to the log. So at start there
are three cases:

- The disk is level with the log: continue.
- The disk is ahead, by one step after a crash, or by several after a power cut that took the end of the log: publish
  those steps in order.
- The disk is behind or empty: rebuild from the adapter in the log.

Checkpoints that do not continue the log belong to another log; they are not touched and the trainer does not
start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

from pipeline import crash, streams
from pipeline.config import Config
from pipeline.events import CheckpointPublished, GroupDiscarded
from pipeline.log.broker import Broker
from pipeline.log.subjects import stream_of
from pipeline.security.signing import Signer, Trust
from pipeline.telemetry.logs import get_logger
from trainer.checkpoints.checkpoint import CheckpointError, Manifest
from trainer.learner import Learner

log = get_logger("trainer.checkpoints.commits")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class TrainerError(Exception):
    """The trainer can't continue without an operator; the message says why and what to do."""


class Commits:
    """Publishes the steps of all models and recovers them at start. `broker` must outlive it."""

    def __init__(self, broker: Broker, config: Config) -> None:
        self.broker, self.config = broker, config
        self._computing = anyio.CapacityLimiter(1)
        self._signer, self._trust = Signer.from_config(config), Trust(config.signing)

    async def published(self, model: str) -> list[CheckpointPublished]:
        """The checkpoints of a model on the log, without those that no trainer signed; they are logged."""
        found = await self.broker.read(CheckpointPublished, **self._keys(model))
        objections = {r.place: self._trust.objection(r.event) for r in found}
        for objection in filter(None, objections.values()):
            log.error("checkpoint refused", reason=objection)
        return [r.event for r in found if not objections[r.place]]

    def _keys(self, model: str) -> dict[str, Any]:
        return {"project": self.config.project, "model": model, "branch": self.config.trainer.branch}

    async def recover(self, learner: Learner, last: CheckpointPublished | None) -> list[Manifest]:
        """Bring `learner` to its newest committed step. `last` is the newest checkpoint on the log, `None` where
        there is none.

        Publishes the checkpoints on disk that are newer than `last`, oldest first, and returns their manifests. Raises
        `TrainerError` where the disk does not continue the log."""
        newest = await self.run_in_thread(learner.checkpoints.newest)
        log_id = await self._log_id()
        known = last.step if last else 0
        if newest is not None and newest[0].event.step > known:
            ahead = await self.run_in_thread(self._steps_ahead, learner, last, log_id)
            for manifest in ahead:
                await self._publish_from_disk(learner, manifest)
            await self.run_in_thread(learner.resume, ahead[-1].event.step)
        else:
            ahead = []
            if last is not None:
                await self._resume_from(learner, last)
                if newest is not None and newest[0].event.adapter_sha256 == last.adapter_sha256:
                    await self._publish_discarded(newest[0])
        await self.run_in_thread(learner.checkpoints.set_log_id, log_id)
        return ahead

    async def republish_lost(self, learner: Learner) -> None:
        """Publish the committed steps again that a power cut of the log's machine took from the log, oldest first."""
        step = learner.state.step
        keys = self._keys(learner.model.name)
        if not step or await self.broker.read_last(CheckpointPublished, step=step, **keys) is not None:
            return
        events = await self.published(learner.model.name)
        last = max((e for e in events if e.step <= step), key=lambda e: e.step, default=None)
        log_id = await self._log_id()
        for manifest in await self.run_in_thread(self._steps_ahead, learner, last, log_id):
            if manifest.event.step <= step:
                await self._publish_from_disk(learner, manifest)

    async def _publish_from_disk(self, learner: Learner, manifest: Manifest) -> None:
        archive = await self.run_in_thread(learner.adapter_archive, manifest.event.step)
        await self.publish(manifest, archive)
        log.warning("published a checkpoint that the log did not hold", version=manifest.event.version)

    async def _log_id(self) -> str:
        """When POLICY was created. It identifies the log: restarts and power cuts of the server do not change it."""
        info = await self.broker.stream_info(stream_of(CheckpointPublished))
        if info.created is None:
            raise TrainerError(
                "the NATS server does not report when the stream POLICY was created: use version 2.11 or newer"
            )
        return str(info.created.isoformat())

    async def _resume_from(self, learner: Learner, last: CheckpointPublished) -> None:
        """Load the checkpoint `last`: from disk where it is there, else its adapter from the object store."""
        try:
            manifest, _ = await self.run_in_thread(learner.checkpoints.read, last.step)
            on_disk = manifest.event.adapter_sha256 == last.adapter_sha256
        except CheckpointError as error:
            log.warning("no usable checkpoint on disk", version=last.version, reason=str(error))
            on_disk = False
        if on_disk:
            await self.run_in_thread(learner.resume, last.step)
        else:
            archive = await self.broker.get_object(streams.ADAPTERS_BUCKET, last.adapter)
            await self.run_in_thread(learner.rebuild, last, archive)

    def _steps_ahead(self, learner: Learner, last: CheckpointPublished | None, log_id: str) -> list[Manifest]:
        """The manifests of the checkpoints on disk that are newer than `last`, oldest first. Raises `TrainerError`
        where they do not continue this log."""
        known = last.step if last else 0
        ahead: list[Manifest] = []
        shared = False
        for step in learner.checkpoints.steps():
            if step < known:
                continue
            try:
                manifest, _ = learner.checkpoints.read(step)
            except CheckpointError as error:
                log.error("damaged checkpoint skipped", reason=str(error))
                continue
            if step > known:
                ahead.append(manifest)
            elif last is not None:
                if manifest.event.adapter_sha256 != last.adapter_sha256:
                    raise _foreign_log(learner, f"{last.version} on disk is not the one on the log")
                shared = True
        first = ahead[0].event
        stored_id = learner.checkpoints.log_id()
        contiguous = first.step == known + 1
        if contiguous and first.parent != (last.version if last else f"{learner.model.name}@0"):
            raise _foreign_log(
                learner, f"{first.version} on disk continues {first.parent}, which is not on the log"
            )
        # The log is the right one if its identity was stored or its newest step is on disk. Where neither is known,
        # only one step may be ahead: that is a crash between disk and log.
        if stored_id != log_id and not shared and (stored_id or len(ahead) > 1 or not contiguous):
            raise _foreign_log(
                learner, f"the disk holds step {ahead[-1].event.step}, the log's newest is {known}"
            )
        if not contiguous:
            log.error(
                "steps lost", model=learner.model.name, first=known + 1, last=first.step - 1,
                detail="neither the log nor the disk holds them; training continues from the next step on disk",
            )  # fmt: skip
        return ahead

    async def publish(self, manifest: Manifest, archive: bytes) -> None:
        """Put the adapter (`archive`, a tar) into the object store, then the event on the log. Safe to repeat.

        Raises `TrainerError` where the log holds another step of that number."""
        event = manifest.event
        crash.point("trainer.after_checkpoint")
        await self.broker.put_object(streams.ADAPTERS_BUCKET, event.adapter, archive)
        crash.point("trainer.after_upload")
        if self._signer is not None:
            event = self._signer.sign(event)
        ack = await self.broker.publish(event, headers=manifest.trace)
        crash.point("trainer.after_publish")
        if ack.duplicate:
            found = await self.broker.read_at(CheckpointPublished, ack.seq)
            if found.event.adapter_sha256 != event.adapter_sha256:
                raise TrainerError(
                    f"the log already holds another {event.version}: does a second trainer run on project "
                    f"{event.project!r}? Stop it; this one resumes from the log when it starts again."
                )

        await self._publish_discarded(manifest)

    async def _publish_discarded(self, manifest: Manifest) -> None:
        """Publish the discards of a step that the log holds, each once: also where a trainer died before it could."""
        for event in manifest.discarded:
            keys: dict[str, Any] = {
                name: getattr(event, name) for name in ("project", "model", "group", "branch")
            }
            held = await self.broker.read(GroupDiscarded, **keys)
            if all(r.event.message_id() != event.message_id() for r in held):
                await self.broker.publish(event)

    async def run_in_thread(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        """The result of `call`, run in a thread so that heartbeats keep held groups alive. One call runs at a time."""
        return await anyio.to_thread.run_sync(call, *args, limiter=self._computing)


def _foreign_log(learner: Learner, why: str) -> TrainerError:
    return TrainerError(
        f"{why}: {learner.checkpoints.folder} holds checkpoints of another log. Point nats.url at their log, or "
        "use a fresh run_dir."
    )
