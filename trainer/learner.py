"""One policy's way from groups to a checkpoint on disk: everything of a step but the log.

`Learner.take` computes a step and writes its checkpoint, `Learner.advance` makes it the present once the log holds it.
Between the two nothing in memory has changed, so a step that is abandoned leaves only a folder that recovery either
publishes or overwrites.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from pipeline import crash
from pipeline.config import Config, ModelConfig, config_hash
from pipeline.events import CheckpointPublished, GroupScored, now_us
from pipeline.names import version_name
from pipeline.telemetry.logs import get_logger
from trainer.batches.groups import (
    PreparedGroup,
    bound_staleness,
    examples,
    staleness_bound,
    trainable_members,
)
from trainer.batches.sampling import defaults_of, sampling_of
from trainer.batches.sequences import TokenSequence
from trainer.checkpoints.checkpoint import (
    STATE_FILE,
    Best,
    Checkpoints,
    Manifest,
    adapter_files,
    batch_id,
    pack,
    state_bytes,
    state_of,
    unpack,
    weights_of,
)
from trainer.engine.engine import Engine, fixed_settings
from trainer.engine.parallel import ProcessGroup
from trainer.engine.state import TrainState, UntrainableError

log = get_logger("trainer.learner")

MAX_TRIES = 10
"""Deaths over one batch after which it is taken for their cause."""


@dataclass(frozen=True, eq=False)
class BatchGroup:
    """A group of the batch and where its event lies in the log."""

    prepared: PreparedGroup
    seq: int
    at: int = 0
    """Stream time in microseconds."""
    left_out: int = 0
    """Sampled tokens that are not trained because of how they were sampled."""


@dataclass(frozen=True, eq=False)
class Taken:
    """A step that is computed and on disk, but not in the log yet."""

    manifest: Manifest
    adapter: bytes
    """The adapter's tar."""
    state: TrainState
    dropped: Mapping[str, tuple[str, ...]]
    """By group, its trajectories with a sequence that memory does not hold."""


class Learner:
    """The training state of one model."""

    def __init__(self, config: Config, model: ModelConfig, engine: Engine) -> None:
        self.config, self.model, self.engine = config, model, engine
        self.settings = config.trainer_of(model)
        self.checkpoints = Checkpoints.of(config, model.name)
        self.checkpoints.open_to_write()
        self.config_hash = config_hash(self.settings)
        self.state = engine.initial_state()
        self._fresh = self.state.weights
        """The adapter of step 0, which changes nothing."""
        self.sampling_defaults = defaults_of(engine.model.get_base_model(), config.vllm.args)
        """What the inference server uses where a request names nothing."""
        if bent := sampling_of(b"{}", self.sampling_defaults).bent_by:
            log.error(
                "tokens of requests that do not say otherwise will not be trained: the server's default has a penalty that the "
                "trainer can't follow; start vLLM with --generation-config vllm (vllm.args), or set it in the requests",
                model=model.name, base=model.base, setting=bent,
            )  # fmt: skip
        self._validation: dict[int, list[float]] = {}
        """Rewards of validation trajectories by the step that played them."""
        self.without_variance = 0
        """Groups since the last step whose rewards were all equal."""
        self.untrained_rewards: list[float] = []
        """Rewards of the training members of groups that were discarded since the last step, whatever for."""

    @property
    def version(self) -> str:
        return version_name(self.model.name, self.state.step)

    # -- recovery ------------------------------------------------------------------------------------------------

    def stored(self) -> Manifest | None:
        """The manifest of the newest complete checkpoint on disk."""
        newest = self.checkpoints.newest()
        return newest[0] if newest else None

    def resume(self, step: int) -> None:
        """Go on from the checkpoint of `step` on disk; the adapters of the steps before it are read back where they
        are still there."""
        state = state_of(*self.checkpoints.read(step))
        for earlier in self.checkpoints.steps():
            if step - self.settings.max_staleness - 1 <= earlier < step:
                state.history[earlier] = weights_of(self.checkpoints.read(earlier)[1])
        if step <= self.settings.max_staleness + 1:
            state.history[0] = self._fresh
        self.engine.load_adapter(state.weights)  # an adapter that does not fit fails here, not in a step
        self.state = state

    def rebuild(self, event: CheckpointPublished, tar: bytes) -> None:
        """Go on from an adapter of the log, with a fresh optimizer: the disk has no state for it."""
        if hashlib.sha256(tar).hexdigest() != event.adapter_sha256:
            raise ValueError(f"the adapter of {event.version} in the object store is not what was published")
        weights = weights_of(unpack(tar))
        self.engine.load_adapter(weights)
        self.state = TrainState(event.step, weights, history={event.step: weights})
        log.warning(
            "optimizer state lost: going on from the adapter in the log", version=event.version,
            checkpoints=str(self.checkpoints.folder),
        )  # fmt: skip

    def tar_of(self, step: int) -> bytes:
        """The adapter's tar of a checkpoint on disk."""
        _, files = self.checkpoints.read(step)
        return pack({name: content for name, content in files.items() if name.startswith("adapter_")})

    # -- validation ----------------------------------------------------------------------------------------------

    def validate(self, group: GroupScored) -> None:
        """Take note of the group's validation members; they are never trained."""
        for member in group.members:
            if member.split == "val" and member.outcome == "scored" and member.first_step == member.last_step:
                self._validation.setdefault(member.last_step, []).append(member.reward)
        for step, rewards in self._validation.items():
            if not step or len(rewards) < self.settings.best_min_trajectories:
                continue
            best = self.checkpoints.best()
            std = float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0
            found = Best(step, float(np.mean(rewards)), len(rewards), std)
            if best is None or best.step == step or best.beaten_by(found):
                self.checkpoints.set_best(found)

    def _validation_metrics(self) -> dict[str, float]:
        if not self._validation:
            return {}
        step = max(self._validation)
        rewards = self._validation[step]
        return {
            "val_step": float(step),
            "val_reward_mean": float(np.mean(rewards)),
            "val_trajectories": float(len(rewards)),
        }

    def foreign_token(self, sequences: Sequence[TokenSequence]) -> int | None:
        """A token id that the model does not have, if there is one: it would break the whole batch."""
        for sequence in sequences:
            outside = (sequence.ids < 0) | (sequence.ids >= self.engine.vocabulary)
            if outside.any():
                return int(sequence.ids[outside][0])
        return None

    # -- a step --------------------------------------------------------------------------------------------------

    def take(self, batch: Sequence[BatchGroup], trace: dict[str, str] | None = None) -> Taken:
        """Compute one optimizer step over `batch` and write its checkpoint. Blocks; `advance` makes it count.

        Raises `UntrainableError` where no try of this batch can succeed, or none has."""
        began, started_at = time.perf_counter(), now_us()
        settings, state = self.settings, self.state
        groups = tuple(g.prepared.event.group for g in batch)
        tries = self.checkpoints.count_try(batch_id(self.version, groups, self.config_hash))
        if tries > MAX_TRIES:
            raise UntrainableError(f"the trainer died {MAX_TRIES} times over this batch")
        fresh, stale = [], 0
        for group in batch:
            bound = staleness_bound(group.prepared.event, settings)
            kept, old = bound_staleness(group.prepared.sequences, state.step, bound)
            stale += old
            fresh.append(
                PreparedGroup(
                    group.prepared.event, tuple(kept), group.prepared.advantages, group.prepared.std
                )
            )
        self.engine.configure(settings)
        prompts = [i for i, g in enumerate(fresh) for _ in g.sequences]
        result = self.engine.step(state, examples(fresh, settings), prompts)
        self.checkpoints.forget_tries()
        metrics = result.metrics | self._group_metrics(batch) | self._validation_metrics()
        metrics["tokens_stale"] = float(stale)
        metrics["tokens_left_out"] = float(sum(g.left_out for g in batch))
        metrics["step_s"] = time.perf_counter() - began
        taken = self._write(batch, result.state, metrics, started_at, trace or {})
        return dataclasses.replace(taken, dropped=_by_group(fresh, result.dropped))

    def _group_metrics(self, batch: Sequence[BatchGroup]) -> dict[str, float]:
        members = [m for g in batch for m in trainable_members(g.prepared.event)]
        rewards = np.array([m.reward for m in members], np.float64)
        return {
            "reward_mean": float(rewards.mean()),
            "reward_mean_all": float(np.mean([*rewards, *self.untrained_rewards])),
            "reward_std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
            "groups": float(len(batch)),
            "no_variance_share": self.without_variance / (self.without_variance + len(batch)),
            "trajectories": float(len(members)),
        }

    def _write(
        self,
        batch: Sequence[BatchGroup],
        state: TrainState,
        metrics: dict[str, float],
        started_at: int,
        trace: dict[str, str],
    ) -> Taken:
        version = version_name(self.model.name, state.step)
        adapter = adapter_files(state.weights, self.engine.lora, self.model.base)
        files = adapter | {STATE_FILE: state_bytes(state)}
        tar = pack(adapter)
        digest = hashlib.sha256(tar).hexdigest()
        groups = tuple(g.prepared.event.group for g in batch)
        manifest = Manifest(
            project=self.config.project,
            model=self.model.name,
            step=state.step,
            version=version,
            parent=self.version,
            batch_id=batch_id(self.version, groups, self.config_hash),
            groups=groups,
            group_seqs=tuple(g.seq for g in batch),
            group_times=tuple(g.at for g in batch),
            config_hash=self.config_hash,
            config=msgspec.to_builtins(self.settings),
            base_model=self.model.base,
            adapter=f"{self.config.project}/{version}/{digest[:16]}",
            adapter_sha256=digest,
            adapter_bytes=len(tar),
            files={name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
            metrics=metrics,
            started_at=started_at,
            written_at=now_us(),
            branch=self.config.trainer.branch,
            trace=trace,
        )
        crash.point("trainer.before_checkpoint")
        self.checkpoints.write(manifest, files)
        return Taken(manifest, tar, state, {})

    def advance(self, taken: Taken) -> None:
        """The log holds the step: it is the present now, and old folders may go."""
        self.state = taken.state
        self.without_variance = 0
        self.untrained_rewards.clear()
        keep = max(self.settings.keep_checkpoints, self.settings.max_staleness + 2)
        best = self.checkpoints.best()
        self.checkpoints.prune(keep, frozenset({best.step} if best else ()))


def _by_group(
    groups: Sequence[PreparedGroup], dropped: Sequence[TokenSequence]
) -> dict[str, tuple[str, ...]]:
    """The trajectories of `dropped`, by the groups that they are of."""
    gone = {id(sequence) for sequence in dropped}
    found = {
        g.event.group: tuple(dict.fromkeys(s.trajectory for s in g.sequences if id(s) in gone))
        for g in groups
    }
    return {group: trajectories for group, trajectories in found.items() if trajectories}


Shape = tuple[object, ...]


def _shape(config: Config, model: ModelConfig) -> Shape:
    """Models with the same one share an engine."""
    settings = config.trainer_of(model)
    return (model.base, *fixed_settings(settings).values())


def make_engines(
    config: Config, scratch: Path, process_group: ProcessGroup | None = None
) -> dict[Shape, Engine]:
    """An engine for each base and adapter shape among the models, in the same order in every process."""
    engines: dict[Shape, Engine] = {}
    for model in config.models:
        shape = _shape(config, model)
        if shape not in engines:
            engine = engines[shape] = Engine(model.base, config.trainer_of(model), scratch)
            engine.warm_up()
            engine.plan_passes()
            engine.number, engine.process_group = len(engines) - 1, process_group
    return engines


def make_learners(
    config: Config, scratch: Path, process_group: ProcessGroup | None = None
) -> dict[str, Learner]:
    """A learner per configured model; models of the same base and adapter shape share one engine."""
    engines = make_engines(config, scratch, process_group)
    learners = {}
    for model in config.models:
        engine = engines[_shape(config, model)]
        engine.configure(config.trainer_of(model))
        learners[model.name] = Learner(config, model, engine)
    return learners
