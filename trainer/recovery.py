"""What a trainer does at its start: from disk and log to the newest committed step of every model.

A step is written to disk first, then published. So there are three cases:

- The disk is level with the log: continue.
- The disk is ahead, by one step after a crash, or by several after a power cut that took the end of the log: publish
  those steps in order.
- The disk is behind or empty: rebuild from the adapter and the training state in the object store.

Where there is neither, training begins with what `models.0.start` names, or with a fresh adapter.

Checkpoints that do not continue the log belong to another log: they are not touched, and the trainer does not start.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence

from anyio.to_thread import run_sync

from pipeline import streams
from pipeline.errors import HistoryGoneError
from pipeline.events import STATE_FILE, CheckpointPublished, DeadLettered, GroupDiscarded, GroupScored
from pipeline.log.broker import Broker, LogEntry
from pipeline.log.messages import Place
from pipeline.log.subjects import stream_of
from pipeline.streams import ConsumerSpec
from pipeline.telemetry.logs import get_logger
from trainer.checkpoints.checkpoint import CheckpointError, Manifest, passed_over_if_damaged
from trainer.checkpoints.commits import Commits, TrainerError, fetch_adapter
from trainer.checkpoints.consumed import Consumed
from trainer.checkpoints.start import read_start
from trainer.checkpoints.tensors import weights_of
from trainer.learner import Learner
from trainer.staleness import is_adapter_kept

logger = get_logger("trainer.recovery")


async def catch_up(commits: Commits, learner: Learner) -> list[CheckpointPublished]:
    """Bring `learner` to its newest committed step, and publish the checkpoints that only the disk holds. Returns the
    checkpoints of its model on the log, oldest first.

    Raises `TrainerError` if the disk does not continue the log, and `ConfigError` if the newest step was trained on
    another base model or with another shape of the adapter."""
    await run_sync(learner.open_folder)
    published = await commits.published(learner.model.name)
    last = max(published, key=lambda event: event.step, default=None)
    log_id = await _log_id(commits.broker)
    await run_sync(_refuse_foreign_log, learner, published, log_id)
    unpublished = await run_sync(_unpublished, learner, last, log_id)
    for manifest in unpublished:
        _, files = await run_sync(learner.checkpoints.read, manifest.event.step)
        await commits.publish(manifest, files)
        logger.warning("published a checkpoint that the log did not hold", version=manifest.event.version)
    if unpublished:
        await run_sync(learner.resume, unpublished[-1].event.step)
    elif last is not None:
        await _resume_from(commits, learner, last, published)
    elif learner.model.start:
        unpublished = [await _begin(commits, learner)]
    await run_sync(learner.checkpoints.set_log_id, log_id)
    return [*published, *(manifest.event for manifest in unpublished)]


async def unacknowledged_groups(
    broker: Broker, consumer: ConsumerSpec, consumed: Consumed
) -> tuple[int, list[LogEntry[GroupScored]]]:
    """Return the number of messages that a trainer before this one had not acknowledged when it died, and all groups
    after the ack floor that the server has delivered, in stream order. The trainer reads them from the log, because the
    server delivers them again only after `ack_wait`, behind newer groups.

    Groups among them that were discarded or are dead letters are added to `consumed`."""
    info = await broker.consumer_info(consumer)
    pending = int(info.num_ack_pending or 0)
    if not pending:
        return 0, []
    floor = int(info.ack_floor.stream_seq) if info.ack_floor else 0
    delivered = int(info.delivered.stream_seq) if info.delivered else 0
    discarded = {
        _identity(e)
        for r in await broker.read(GroupDiscarded, start_seq=floor + 1)
        # `too_large` concerns some trajectories; the group itself trains.
        if (e := r.event).by == "trainer" and e.reason != "too_large"
    }
    letters = await broker.read(DeadLettered, stream=consumer.stream, consumer=consumer.name)
    dead = {Place(r.event.stream_seq, r.event.stream_at) for r in letters}
    groups = [r for r in await broker.read(GroupScored, start_seq=floor + 1) if r.seq <= delivered]
    for recorded in groups:
        group = recorded.event
        if recorded.place in dead or _identity(group) in discarded:
            consumed.add(recorded.place)
    return pending, groups


def _identity(event: GroupScored | GroupDiscarded) -> tuple[str, ...]:
    """Return what identifies a group on the log: each project, branch, model, split and verdict set may have a group of
    the same name."""
    return event.project, event.branch, event.model, event.group, event.split, event.judge


async def _log_id(broker: Broker) -> str:
    """Return the time at which the stream POLICY was created. It identifies the log: restarts and power cuts of the
    server do not change it."""
    info = await broker.stream_info(stream_of(CheckpointPublished))
    if info.created is None:
        raise TrainerError(
            "the NATS server does not report when the stream POLICY was created: use version 2.11 or newer"
        )
    return str(info.created.isoformat())


async def _begin(commits: Commits, learner: Learner) -> Manifest:
    """Publish the checkpoint that `models.0.start` names, and continue from it."""
    start = await run_sync(read_start, learner.model.start, commits.config)
    pending = await run_sync(learner.begin, start)
    await commits.publish(pending.manifest, pending.files)
    await run_sync(learner.resume, pending.state.step)
    logger.info("training begins with a version from elsewhere", version=learner.version, source=start.source)
    return pending.manifest


async def _resume_from(
    commits: Commits, learner: Learner, last: CheckpointPublished, published: Sequence[CheckpointPublished]
) -> None:
    """Load the checkpoint `last` from disk, or from the object store if the disk does not have it. From the store it
    comes with the adapters of the steps before whose tokens may still be trained, as far as the store has them."""
    try:
        manifest, _ = await run_sync(learner.checkpoints.read, last.step)
    except CheckpointError as error:
        logger.warning("no usable checkpoint on disk", version=last.version, reason=str(error))
    else:
        if manifest.event.adapter_sha256 == last.adapter_sha256:
            await run_sync(learner.resume, last.step)
            await commits.publish_discards(manifest)
            return
    files = await fetch_adapter(commits.broker, last)
    try:
        state = await commits.broker.get_object(streams.ADAPTERS_BUCKET, last.state)
        if hashlib.sha256(state).hexdigest() == last.files[STATE_FILE]:
            files[STATE_FILE] = state
    except HistoryGoneError as error:
        logger.warning("no training state in the object store", version=last.version, reason=str(error))
    earlier = {}
    for event in published:
        if is_adapter_kept(event.step, last.step, learner.settings):
            # Without its adapter, the logprobs of that version's tokens are not checked.
            with contextlib.suppress(HistoryGoneError), passed_over_if_damaged():
                earlier[event.step] = weights_of(await fetch_adapter(commits.broker, event))
    await run_sync(learner.resume_from, last, files, earlier)


def _unpublished(learner: Learner, last: CheckpointPublished | None, log_id: str) -> list[Manifest]:
    """The manifests of the checkpoints on disk that are newer than `last`, the newest on the log, oldest first. Raises
    `TrainerError` if they do not continue this log."""
    last_step = last.step if last else 0
    manifests: dict[int, Manifest] = {}
    for step in learner.checkpoints.steps():
        if step >= last_step:
            try:
                manifests[step] = learner.checkpoints.read(step)[0]
            except CheckpointError as error:
                logger.error("damaged checkpoint skipped", reason=str(error))
    shared = manifests.pop(last_step, None)
    if not manifests:
        return []
    unpublished = list(manifests.values())
    first = unpublished[0].event
    if shared is not None and last is not None and shared.event.adapter_sha256 != last.adapter_sha256:
        raise _foreign_log(learner, f"{last.version} on disk is not the one on the log")
    if first.step == last_step + 1 and first.parent != (last.version if last else f"{learner.model.name}@0"):
        raise _foreign_log(learner, f"{first.version} on disk continues {first.parent}, which is not on the log")
    # The log is the right one if its identity was stored or its newest step is on disk.
    if shared is None and learner.checkpoints.log_id() not in ("", log_id):
        raise _foreign_log(
            learner, f"the disk holds step {unpublished[-1].event.step}, the log's newest is {last_step}"
        )
    if first.step > last_step + 1 and not first.source:
        logger.error(
            "steps lost",
            model=learner.model.name,
            first=last_step + 1,
            last=first.step - 1,
            detail="neither the log nor the disk holds them; training continues from the next step on disk",
        )
    return unpublished


def _refuse_foreign_log(learner: Learner, published: Sequence[CheckpointPublished], log_id: str) -> None:
    """Raise `TrainerError` if the checkpoints on disk were published on another log, and this one has none of them. A
    log that was restored from a backup has another identity and the same checkpoints."""
    checkpoints = learner.checkpoints
    steps = checkpoints.steps()
    if not steps or checkpoints.log_id() in ("", log_id):
        return
    on_log = {event.step: event.adapter_sha256 for event in published}
    for step in on_log.keys() & steps:
        with contextlib.suppress(CheckpointError):
            if checkpoints.read(step)[0].event.adapter_sha256 == on_log[step]:
                return
    raise _foreign_log(learner, f"none of the steps on disk, up to {max(steps)}, is on the log")


def _foreign_log(learner: Learner, why: str) -> TrainerError:
    """Return the error for checkpoints on disk that belong to another log, which `why` shows."""
    return TrainerError(
        f"{why}: {learner.checkpoints.folder} holds checkpoints of another log. Point nats.url at their log, or "
        "use a fresh run_dir."
    )
