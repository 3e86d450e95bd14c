"""Trains one policy: from a batch of groups to a checkpoint on disk. It does not use the log.

`Learner.train_step` computes a step and writes its checkpoint. `Learner.make_current` makes the step current, once the
log holds it. Between the two the learner's state is that of the step before, so an abandoned step leaves only a
folder, which recovery publishes or the next step overwrites.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pipeline import crash
from pipeline.chat.sampling import sampling_of
from pipeline.config import Config, ConfigError, ModelConfig, TrainerConfig, config_hash, with_batch_settings
from pipeline.events import STATE_FILE, CheckpointPublished, GroupDiscarded, TrainingBatch, now_us, pack_seqs
from pipeline.names import version_name
from pipeline.telemetry.logs import get_logger
from trainer.batches.graders import cap_graders
from trainer.batches.groups import DiscardedGroup, GroupWithHistory, group_metrics
from trainer.batches.sampling import defaults_of
from trainer.checkpoints.checkpoint import Checkpoints, Manifest, adapter_archive, batch_id, passed_over_if_damaged
from trainer.checkpoints.compatibility import require_compatible
from trainer.checkpoints.start import Start
from trainer.checkpoints.tensors import adapter_files, state_bytes, state_of, weights_of
from trainer.checkpoints.validation import Validation
from trainer.distillation.prompts import HintedPrompts
from trainer.engine.engine import Engine
from trainer.engine.images import ImageUnusableError
from trainer.engine.late import LateRunsError
from trainer.engine.model import load_settings
from trainer.engine.parallel import ProcessGroup
from trainer.engine.state import StepResult, TrainState, UntrainableError, Weights
from trainer.sequences import TokenSequence
from trainer.staleness import is_adapter_kept, is_late, versions_kept

logger = get_logger("trainer.learner")

MAX_ATTEMPTS = 10
"""After the process died this many times while it computed the same batch, the batch is not computed again."""
_MAX_ATTEMPTS_ALONE = 2
"""The same for a group that is tried alone, to find out which of a batch is at fault."""


@dataclass(frozen=True, eq=False)
class PendingStep:
    """A step that is computed and on disk, but not on the log yet."""

    manifest: Manifest
    files: dict[str, bytes]
    """The checkpoint's files by name."""
    state: TrainState
    """The training state after the step."""
    discarded: int = 0
    """How many of `Learner.discarded` its metrics count."""


class Learner:
    """The training state of one model, its checkpoints, and statistics of the groups since the last step."""

    def __init__(self, config: Config, model: ModelConfig, engine: Engine) -> None:
        self.config, self.model, self.engine = config, model, engine
        self.settings = config.trainer_of(model)
        self.checkpoints = Checkpoints.of(config, model.name)
        self.state = engine.initial_state()
        self._first_adapter = self.state.weights
        """The adapter of step 0, with which the model computes the same as the base model."""
        self.sampling_defaults = defaults_of(engine.model.peft.get_base_model(), config.vllm.flags)
        """Sampling parameters that the inference server uses where a request names none."""
        if unsupported := sampling_of(b"{}", self.sampling_defaults).unsupported:
            logger.error(
                "replies sampled with the inference server's default penalty are not trained, because the trainer "
                "can't compute it: start vLLM with --generation-config vllm (vllm.args), or switch the penalty off "
                "in the requests",
                model=model.name,
                base=model.base,
                setting=unsupported,
            )
        text_config = engine.model.peft.get_base_model().config.get_text_config()
        longest = engine.model.longest or getattr(text_config, "max_position_embeddings", None)
        self.prompts = (
            HintedPrompts(model.base, self.settings.distill, longest)
            if self.settings.distill.weight and not self.settings.distill.asks_outside
            else None
        )
        self.validation = Validation(None, self.settings.best_min_trajectories)
        self.discarded: list[DiscardedGroup] = []
        """Groups that were not trained and that no step's metrics count yet. The intake adds to them, also while a step
        is computed."""

    @property
    def version(self) -> str:
        """Name of the current policy version."""
        return version_name(self.model.name, self.state.step)

    # -- recovery ------------------------------------------------------------------------------------------------

    def open_folder(self) -> None:
        """Prepare the folder of the model's checkpoints, where only this process may write from now on, and read which
        step is the best one."""
        self.checkpoints.prepare_folder()
        self.validation = Validation(self.checkpoints.best(), self.settings.best_min_trajectories)

    def resume(self, step: int) -> None:
        """Load the checkpoint of `step` from disk, with the undamaged adapters of the steps before whose tokens may
        still be trained. Raises `CheckpointError` if the checkpoint is missing or damaged; `ConfigError` if it was
        trained on another base model or with another shape of the adapter."""
        manifest, files = self.checkpoints.read(step)
        earlier = {}
        for n in self.checkpoints.steps():
            if is_adapter_kept(n, step, self.settings):
                with passed_over_if_damaged():
                    earlier[n] = weights_of(self.checkpoints.read(n)[1])
        self.resume_from(manifest.event, files, earlier)

    def resume_from(
        self, event: CheckpointPublished, files: Mapping[str, bytes], earlier: Mapping[int, Weights]
    ) -> None:
        """Continue from the checkpoint of `event`. `files`: those of its adapter, with the training state if there is
        one; without it, the optimizer is a fresh one. `earlier`: adapters of the steps before it, by step. Raises
        `ConfigError` as `resume` does."""
        model = self.engine.model
        require_compatible(event, files, model.base_digest, model.lora, event.version)
        state = self._state_in(files, event.step)
        state.history |= earlier
        if is_adapter_kept(0, event.step, self.settings):
            state.history[0] = self._first_adapter
        # If the adapter does not fit, the error is raised now, not in a step.
        model.load_adapter(state.weights)
        self.state = state
        if STATE_FILE not in files:
            logger.warning(
                "optimizer state lost: training continues from the adapter in the log",
                version=event.version,
                checkpoints=str(self.checkpoints.folder),
            )

    def _state_in(self, files: Mapping[str, bytes], step: int) -> TrainState:
        """The training state in a checkpoint's files, as that of `step`; without one, the files' adapter with a fresh
        optimizer."""
        if STATE_FILE in files:
            return state_of(step, files)
        return self.engine.state_with(step, weights_of(files))

    def _checked_state(self, start: Start, step: int) -> TrainState:
        """The training state of a version or an adapter from elsewhere, as that of `step`. Raises `ConfigError` as
        `resume` does, and if the adapter does not fit the model."""
        model = self.engine.model
        require_compatible(start.event, start.files, model.base_digest, model.lora, start.source)
        state = self._state_in(start.files, step)
        try:
            model.load_adapter(state.weights)
        except ValueError as error:
            raise ConfigError(
                f"{start.source}: {error}; or merge it into its base, and name the merged model as models.base"
            ) from error
        return state

    def begin(self, start: Start) -> PendingStep:
        """Write the checkpoint of `models.0.start`, from which training begins: a version of a lake keeps its step, a
        PEFT adapter becomes step 1. Raises `ConfigError` as `_checked_state` does."""
        state = self._checked_state(start, start.event.step if start.event else 1)
        return self.write_step(state, source=start.source)

    def adopt(self, start: Start) -> PendingStep:
        """Write the next checkpoint with a version of another branch or lake, optimizer included: training goes on from
        it. Raises `ConfigError` as `_checked_state` does."""
        step = self.state.step + 1
        adopted = self._checked_state(start, step)
        state = dataclasses.replace(adopted, history=self.state.history | {step: adopted.weights})
        return self.write_step(state, source=start.source, started_at=now_us())

    # -- groups --------------------------------------------------------------------------------------------------

    def why_unusable(self, sequences: Sequence[TokenSequence]) -> str:
        """Return why the model can't compute one of `sequences`, which would make the whole batch fail; an empty string
        if it can compute all."""
        model = self.engine.model
        for sequence in sequences:
            outside = (sequence.ids < 0) | (sequence.ids >= model.vocabulary)
            if outside.any():
                return f"token {int(sequence.ids[outside][0])} is not in the model's vocabulary"
            if not sequence.images:
                continue
            if model.images is None:
                return f"the run has images, and {model.base} is trained without images: the trainer's log says why"
            try:
                model.images.check(sequence.ids, sequence.images)
            except ImageUnusableError as error:
                return str(error)
        return ""

    # -- a step --------------------------------------------------------------------------------------------------

    def train_step(self, batch: Sequence[GroupWithHistory], request: TrainingBatch | None = None) -> PendingStep:
        """Compute one optimizer step over `batch` and write its checkpoint. Blocks. `make_current` makes the step the
        current one.

        The groups have their sequences, with stale tokens as context. `request` may hold settings for this step.
        Raises `UntrainableError` if the batch can't be trained, or if the process died `MAX_ATTEMPTS` times while it
        computed the batch."""
        began, started_at = time.perf_counter(), now_us()
        places = [g.admitted.place for g in batch]  # before the computation: the intake may replace a group's place
        settings = self.settings_for(request)
        discarded = tuple(self.discarded)
        result = self._compute(batch, settings, MAX_ATTEMPTS)
        self.checkpoints.clear_attempts()
        metrics = result.metrics | self.validation.metrics()
        metrics |= group_metrics(batch, discarded)
        metrics["step_s"] = time.perf_counter() - began
        metrics["gpu_s"] = metrics["step_s"] * self.engine.passes.processes
        pending = self.write_step(
            result.state,
            batch,
            settings,
            dropped=result.dropped,
            group_seqs=pack_seqs([p.seq for p in places]),
            group_times=pack_seqs([p.at for p in places]),
            metrics=metrics,
            started_at=started_at,
        )
        return dataclasses.replace(pending, discarded=len(discarded))

    def write_step(
        self,
        state: TrainState,
        batch: Sequence[GroupWithHistory] = (),
        settings: TrainerConfig | None = None,
        *,
        dropped: Sequence[TokenSequence] = (),
        **fields: Any,
    ) -> PendingStep:
        """Write the checkpoint of `state`, the state after a step, to disk. `batch`: the groups of the step, none for a
        step over something else; `dropped`: their sequences that were left out; `settings`: those of the step;
        `fields`: further fields of the checkpoint's event."""
        settings = settings or self.settings
        files = adapter_files(state.weights, self.engine.model.lora, self.model.base)
        files[STATE_FILE] = state_bytes(state)
        archive = adapter_archive(files)
        version = version_name(self.model.name, state.step)
        digest = hashlib.sha256(archive).hexdigest()
        event = CheckpointPublished(
            project=self.config.project,
            at=now_us(),
            model=self.model.name,
            step=state.step,
            version=version,
            parent=self.version,
            batch_id=self._batch_id(batch, settings),
            groups=tuple(g.event.group for g in batch),
            config_hash=config_hash(settings),
            base_model=self.model.base,
            base_digest=self.engine.model.base_digest,
            adapter=f"{self.config.project}/{version}/{digest[:16]}",
            adapter_sha256=digest,
            adapter_bytes=len(archive),
            files={name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
            branch=self.config.trainer.branch,
            **fields,
        )
        discarded = _too_large_discards(batch, dropped, version)
        manifest = Manifest(event=event, config=msgspec.to_builtins(settings), discarded=discarded)
        crash.point("trainer.before_checkpoint")
        self.checkpoints.write(manifest, files)
        return PendingStep(manifest, files, state)

    def untrainable_alone(
        self, batch: Sequence[GroupWithHistory], request: TrainingBatch | None = None
    ) -> dict[GroupWithHistory, str]:
        """Find out which groups made a batch untrainable: compute a step over each group alone and abandon it. Returns
        the groups that fail alone, with the reason; none where `settings_for` refuses the request's settings.
        Blocks."""
        try:
            settings = self.settings_for(request)
        except UntrainableError:
            return {}
        reasons = {}
        for group in batch:
            try:
                self._compute([group], settings, _MAX_ATTEMPTS_ALONE)
            except LateRunsError:
                pass  # measured over all late runs of the batch, it may be large enough
            except UntrainableError as error:
                reasons[group] = str(error)
            self.checkpoints.clear_attempts(self._batch_id([group], settings))
        return reasons

    def late_groups(self, batch: Sequence[GroupWithHistory], request: TrainingBatch | None) -> list[GroupWithHistory]:
        """Return the groups of a batch with late sequences (`trainer.staleness.is_late`)."""
        settings = self.settings_for(request)
        return [g for g in batch if any(is_late(s, self.state.step, settings) for s in g.sequences)]

    def settings_for(self, request: TrainingBatch | None) -> TrainerConfig:
        """The settings of a step for `request`, which may choose some of them. Raises `UntrainableError` if these can't
        be used."""
        if request is None:
            return self.settings
        try:
            return with_batch_settings(self.settings, msgspec.json.decode(request.settings))
        except ConfigError as error:
            raise UntrainableError(f"the batch's settings can't be used: {error}") from error

    def _batch_id(self, batch: Sequence[GroupWithHistory], settings: TrainerConfig) -> str:
        """Return the id of the step over `batch` that continues the current version."""
        return batch_id(self.version, tuple(g.event.group for g in batch), config_hash(settings))

    def _compute(self, batch: Sequence[GroupWithHistory], settings: TrainerConfig, max_attempts: int) -> StepResult:
        """Compute a step over `batch`; `self.state` is unchanged. Raises `UntrainableError`, also if the process died
        in `max_attempts` earlier computations of the batch."""
        attempt = self.checkpoints.count_attempt(self._batch_id(batch, settings))
        if attempt > max_attempts:
            raise UntrainableError(f"the trainer died or failed {max_attempts} times while it computed this batch")
        try:
            self.engine.configure(settings)
        except ConfigError as error:  # a requested batch chose what the model was loaded with, such as the rank
            raise UntrainableError(f"the batch's settings can't be used: {error}") from error
        if self.engine.model.sharded:  # its processes can't try again when one of them runs out of memory
            budget = self.engine.passes.budget
            budget.tokens = max(1, settings.memory.tokens_per_batch >> (attempt - 1))
        group_of = [i for i, g in enumerate(batch) for _ in g.sequences]
        examples, grader_metrics = cap_graders(batch, settings, self.config.feedback.max_share)
        result = self.engine.step(self.state, examples, group_of)
        return dataclasses.replace(result, metrics=result.metrics | grader_metrics)

    def make_current(self, pending: PendingStep) -> None:
        """Make the step current, after its event is on the log. Deletes checkpoints that are no longer needed."""
        self.state = pending.state
        del self.discarded[: pending.discarded]
        keep = max(self.settings.keep_checkpoints, versions_kept(self.settings))
        best = self.validation.best
        self.checkpoints.prune(keep, frozenset({best.step} if best else ()))


def _too_large_discards(
    batch: Sequence[GroupWithHistory], dropped: Sequence[TokenSequence], version: str
) -> tuple[GroupDiscarded, ...]:
    """Return a `too_large` discard for each group with `dropped` sequences. It names the trajectories of these."""
    names = {sequence.trajectory for sequence in dropped}
    groups = [(g, tuple(m.trajectory for m in g.members if m.trajectory in names)) for g in batch]
    return tuple(
        g.event.discarded(
            trajectories=trajectories,
            reason="too_large",
            by="trainer",
            version=version,
            duration_s=g.history.duration_s,
            detail="one of their sequences is longer than the trainer's model takes, or a pass over it alone does not "
            "fit into memory; the rest of the group was trained",
        )
        for g, trajectories in groups
        if trajectories
    )


def make_engines(config: Config, process_group: ProcessGroup | None = None) -> dict[str, Engine]:
    """Return the engine of each model, by the model's name. Models share one if they have the same base and load
    settings. The engines are made, and numbered, in the same order in every process."""
    engines: dict[tuple[object, ...], Engine] = {}
    engine_of = {}
    for model in config.models:
        settings = config.trainer_of(model)
        key = (model.base, *load_settings(settings).values())
        if key not in engines:
            engines[key] = Engine(model.base, settings, process_group, len(engines))
        engine_of[model.name] = engines[key]
    return engine_of


def make_learners(config: Config, process_group: ProcessGroup | None = None) -> dict[str, Learner]:
    """Return a learner for each configured model, by name, with its engine (`make_engines`). Raises `ConfigError` if a
    model's settings do not work with its engine."""
    engine_of = make_engines(config, process_group)
    learners = {model.name: Learner(config, model, engine_of[model.name]) for model in config.models}
    for learner in learners.values():
        learner.engine.configure(learner.settings)
    return learners
