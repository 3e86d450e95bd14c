"""The commit protocol: a step that is on disk goes to the object store and to the log.

Adapter and training state are uploaded first, then the event is published, then the discards of what did not fit into
memory. Each part can be repeated: after a crash, `trainer.recovery` makes the same calls again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from pipeline import crash, streams
from pipeline.config import Config
from pipeline.events import STATE_FILE, CheckpointPublished, GroupDiscarded
from pipeline.log.broker import Broker
from pipeline.log.stream_reader import after_catching_up
from pipeline.security.signing import Signer, Trust
from pipeline.telemetry.logs import get_logger
from trainer.checkpoints.checkpoint import CheckpointError, Manifest, adapter_archive, unpack

logger = get_logger("trainer.checkpoints.commits")


class TrainerError(Exception):
    """The trainer can't continue; the message says why and what to do."""


class LogShrankError(TrainerError):
    """The log lost its end, as in a power cut. The trainer's next start reads it anew and publishes what is missing."""


class Commits:
    """Publishes the steps of all models. `broker` must outlive it."""

    def __init__(self, broker: Broker, config: Config) -> None:
        self.broker, self.config = broker, config
        self._signer, self._trust = Signer.from_config(config), Trust(config.signing)

    async def published(self, model: str) -> list[CheckpointPublished]:
        """Return the checkpoints of a model on the log. Those that no trainer signed are left out, and an error is
        logged."""
        events = [r.event for r in await self.broker.read(CheckpointPublished, **self._keys(model))]
        trusted = []
        for event in events:
            if objection := self._trust.objection(event):
                logger.error("checkpoint refused", reason=objection)
            else:
                trusted.append(event)
        return trusted

    def _keys(self, model: str) -> dict[str, Any]:
        """Return the fields by which the log finds the checkpoints of a model on the branch that is trained."""
        return {"project": self.config.project, "model": model, "branch": self.config.trainer.branch}

    async def require_on_log(self, model: str, step: int) -> None:
        """Raise `LogShrankError` if the log does not hold the committed checkpoint of `step`. Step 0 has none."""

        async def holds() -> bool:
            return await self.broker.read_last(CheckpointPublished, step=step, **self._keys(model)) is not None

        if step and not await after_catching_up(holds):
            raise LogShrankError(
                f"the log lost its end: it no longer holds {model}@{step}. Start the trainer again: it reads the log "
                "anew and publishes the steps that the log lost"
            )

    async def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        """Put the adapter and the training state of a checkpoint (`files`) into the object store, then the events on
        the log. Safe to repeat.

        Raises `TrainerError` if the log holds another step of that number."""
        event = manifest.event
        crash.point("trainer.after_checkpoint")
        await self.broker.put_object(streams.ADAPTERS_BUCKET, event.adapter, adapter_archive(files))
        crash.point("trainer.between_uploads")
        if event.state:
            await self.broker.put_object(streams.ADAPTERS_BUCKET, event.state, files[STATE_FILE])
        crash.point("trainer.after_upload")
        if self._signer is not None:
            event = self._signer.sign(event)
        ack = await self.broker.publish(event)
        crash.point("trainer.after_publish")
        if ack.duplicate:
            on_log = await self.broker.read_at(CheckpointPublished, ack.seq)
            if on_log.event.adapter_sha256 != event.adapter_sha256:
                raise TrainerError(
                    f"the log already holds another {event.version}: does a second trainer run on project "
                    f"{event.project!r}? Stop it; this one resumes from the log when it starts again."
                )
        await self.publish_discards(manifest)

    async def publish_discards(self, manifest: Manifest) -> None:
        """Publish the discards of a step whose checkpoint is on the log. Safe to repeat.

        Each is looked up first: the server recognises a duplicate only for some minutes, and a trainer that died
        between the checkpoint and its discards may start again later than that."""
        for event in manifest.discarded:
            keys: dict[str, Any] = {name: getattr(event, name) for name in ("project", "model", "group", "branch")}
            on_log = await self.broker.read(GroupDiscarded, **keys)
            if all(r.event.message_id() != event.message_id() for r in on_log):
                await self.broker.publish(event)


async def fetch_adapter(broker: Broker, event: CheckpointPublished) -> dict[str, bytes]:
    """Return the files of a version's adapter from the object store. Raises `CheckpointError` if they are not the
    event's."""
    archive = await broker.get_object(streams.ADAPTERS_BUCKET, event.adapter)
    if hashlib.sha256(archive).hexdigest() != event.adapter_sha256:
        raise CheckpointError(
            f"the adapter of {event.version} in the object store does not match its event: do not use it, and restore "
            "the object store"
        )
    return unpack(archive)
