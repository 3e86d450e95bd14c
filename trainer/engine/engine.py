"""Optimizer steps over one model.

One engine holds one base model. Several policies over it take turns: an adapter is a small dictionary of tensors that
is copied in before a step and out after it.

A step takes one optimizer update over its batch, or `trainer.optimizer.epochs` times `trainer.optimizer.minibatches`
of them, as PPO does. The probability ratios of all updates are to the policy before the first one (see
`trainer.engine.loss_inputs.inputs_of`)."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from pipeline.config import TrainerConfig
from pipeline.telemetry.logs import get_logger
from trainer.batches.examples import Example
from trainer.distillation.teacher import HintedCall, TeacherLogprobs, join_logprobs
from trainer.engine import checks
from trainer.engine.fitting import Fitted, NothingFitsError, check_within_memory, run_within_memory
from trainer.engine.late import late_metrics
from trainer.engine.loading import peak_tflop_per_s
from trainer.engine.model import PolicyModel
from trainer.engine.optimizer import PolicyOptimizer
from trainer.engine.parallel import ProcessGroup
from trainer.engine.passes import IndexedLogprobs, Passes, PassResult, first_logprobs
from trainer.engine.state import SamplerMismatchError, StepResult, TrainState, Weights
from trainer.engine.verify import logprob_bound_for
from trainer.sequences import TokenSequence
from trainer.staleness import is_adapter_kept, is_late

logger = get_logger("trainer.engine.engine")
T = TypeVar("T")
_AVERAGE_RATE = 0.05
"""Weight of the newest adapter in the average that teaches (`trainer.distill.teacher`), updated once a step."""


def updates_of(group_of: Sequence[int], config: TrainerConfig, step: int) -> Iterator[list[int]]:
    """Yield the indices of the examples of each optimizer update of a step; `group_of[i]` is the group of example i.

    Minibatches hold whole groups, shuffled in every epoch: a group's advantages are relative to each other, and its
    prefixes are shared. The order depends on the seed and the step alone, so a step that is repeated is the same
    step."""
    names = list(dict.fromkeys(group_of))
    count = min(config.optimizer.minibatches, len(names))
    for epoch in range(config.optimizer.epochs):
        order = np.random.default_rng([config.seed, step, epoch]).permutation(len(names))
        for part in np.array_split(order, count):
            members = {names[i] for i in part}
            yield [index for index, group in enumerate(group_of) if group in members]


def with_kl_penalty(
    examples: Sequence[Example], policy: IndexedLogprobs, base: IndexedLogprobs, coefficient: float
) -> list[Example]:
    """Return the examples with the KL penalty of `trainer.loss.kl_penalty`, from the logprobs of their trained tokens
    by the policy before the step and by the base model."""
    ratios = [policy[i] - base[i] for i in range(len(examples))]
    mean = float(np.concatenate(ratios).mean())
    return [
        dataclasses.replace(e, kl_penalty=coefficient * (mean - ratio))
        for e, ratio in zip(examples, ratios, strict=True)
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class Updates:
    """The optimizer updates of a step."""

    examples: Sequence[Example]
    """The examples that were trained: they fit into memory."""
    group_of: Sequence[int]
    """`group_of[i]` is the group of `examples[i]`."""
    dropped: tuple[TokenSequence, ...]
    """The sequences that do not fit."""
    results: list[PassResult]
    """A result for each process in each update."""
    norms: list[float]
    """The gradient's norm before clipping, for each update."""


class Engine:
    """A model, the passes over it, and its optimizer steps."""

    def __init__(
        self, base: str, config: TrainerConfig, process_group: ProcessGroup | None = None, number: int = 0
    ) -> None:
        """`process_group`: the processes that share the passes, if there are several; `number`: the engine's index
        among those of a process, equal in all processes."""
        self.model = PolicyModel(base, config, process_group)
        self.passes = Passes(self.model, process_group, number)

    @property
    def config(self) -> TrainerConfig:
        return self.model.config

    def configure(self, config: TrainerConfig) -> None:
        """Apply other settings to the same model.

        Raises `ConfigError` where they contradict each other, or change what the model was loaded with."""
        self.passes.configure(config)

    def initial_state(self) -> TrainState:
        """Return the state of step 0 with the live adapter. PEFT's fresh adapter changes nothing of the base model."""
        return self.state_with(0, self.model.weights())

    def state_with(self, step: int, weights: Weights) -> TrainState:
        """Return the state of `step` with the adapter `weights` and a fresh optimizer."""
        published = self.model.as_published(weights)
        return TrainState(step, published, history={step: published}, master=None if published is weights else weights)

    def step(self, state: TrainState, examples: Sequence[Example], group_of: Sequence[int]) -> StepResult:
        """Take one step over `examples`; `group_of[i]` says which of them share prefixes. `state` is not modified, so
        an abandoned step leaves no trace.

        Sequences that the model cuts off, and those that do not fit into memory even alone, are left out. Raises
        `UntrainableError`, and nothing is changed, where none is left, where a gradient is not finite, and where the
        sampler's logprobs are not the trainer's; `LateRunsError` where late examples are too far from the policy."""
        self.model.set_threads()
        began = time.perf_counter()
        # First: it loads the adapter of `state`, under which everything below is computed.
        optimizer = PolicyOptimizer(self.model, state)
        examples, metrics_of_late = self._mark_late(state.step, examples, group_of)
        updates = self._update(state, optimizer, *self._prepare(state, examples, group_of))
        metrics = self._measure(state, updates) | metrics_of_late
        metrics["learning_rate"] = float(optimizer.adamw.param_groups[0]["lr"])
        step, weights = state.step + 1, optimizer.weights
        history = {s: w for s, w in state.history.items() if is_adapter_kept(s, step, self.config)}
        history[step] = weights
        after = TrainState(
            step,
            weights,
            optimizer.adamw.state_dict(),
            history,
            None if weights is optimizer.master else optimizer.master,
            self._average_adapter(state, weights),
        )
        metrics |= self._speed(metrics, time.perf_counter() - began)
        return StepResult(after, metrics, updates.dropped)

    def _run_fitting(
        self,
        work: Callable[[Sequence[Example], Sequence[int]], T],
        examples: Sequence[Example],
        group_of: Sequence[int],
        step: int,
    ) -> Fitted[T]:
        """Return the result of `work(examples, group_of)`, part of the step after `step`, over the examples that fit
        into memory. Raises `NothingFitsError`."""
        return run_within_memory(work, examples, group_of, self.passes.budget, self.passes.free, step + 1)

    def _mark_late(
        self, step: int, examples: Sequence[Example], group_of: Sequence[int]
    ) -> tuple[list[Example], dict[str, float]]:
        """Return the examples with `late` set on those that are late at `step` (`trainer.staleness`), and the metrics
        of these. They are measured under the live adapter. Raises `LateRunsError`."""
        marked = [dataclasses.replace(e, late=is_late(e.sequence, step, self.config)) for e in examples]
        longest = self.model.longest or sys.maxsize
        late = [i for i, e in enumerate(marked) if e.late and len(e.sequence.ids) <= longest]
        if not late:
            return marked, {}
        fitted = self._run_fitting(self.passes.logprobs, [marked[i] for i in late], [group_of[i] for i in late], step)
        logprobs = [fitted.result[n] for n in range(len(fitted.examples))]
        return marked, late_metrics([e.sequence for e in fitted.examples], logprobs, self.config)

    def _prepare(
        self, state: TrainState, examples: Sequence[Example], group_of: Sequence[int]
    ) -> tuple[list[Example], Sequence[int], list[TokenSequence]]:
        """Add to the examples what the updates of a step need: logprobs by the policy before the step, the KL penalty
        to the base model, and the teacher's logprobs. Returns the examples, the group of each, and the sequences that
        are left out because they are too long for the model or do not fit into memory."""
        passes = self.passes
        dropped = self._too_long(examples)
        whole = [i for i, e in enumerate(examples) if e.sequence not in dropped]
        if not whole:
            raise NothingFitsError(dropped, state.step + 1)
        examples, group_of = [examples[i] for i in whole], [group_of[i] for i in whole]
        several_updates = len(list(updates_of(group_of, self.config, state.step))) > 1
        kl_penalty = 0.0 if self.config.loss.type == "sft" else self.config.loss.kl_penalty
        if several_updates or kl_penalty:
            fitted = self._run_fitting(passes.logprobs, examples, group_of, state.step)
            examples, group_of = list(fitted.examples), fitted.group_of
            dropped += fitted.dropped
            if kl_penalty:
                base = passes.logprobs(examples, group_of, base=True)
                examples = with_kl_penalty(examples, fitted.result, base, kl_penalty)
            if several_updates:
                examples = [dataclasses.replace(e, old_logprobs=fitted.result[i]) for i, e in enumerate(examples)]
        return self._with_teacher(state, examples, group_of), group_of, dropped

    def _update(
        self,
        state: TrainState,
        optimizer: PolicyOptimizer,
        examples: Sequence[Example],
        group_of: Sequence[int],
        dropped: list[TokenSequence],
    ) -> Updates:
        """Take the optimizer updates of a step over the examples that fit into memory. Adds the sequences that do not
        fit to `dropped`."""
        results: list[PassResult] = []
        norms: list[float] = []
        for part in updates_of(group_of, self.config, state.step):
            fitting = [i for i in part if examples[i].sequence not in dropped]
            if not fitting:
                continue
            self.model.peft.zero_grad(set_to_none=True)
            try:
                fitted = self._run_fitting(
                    self.passes.gradients, [examples[i] for i in fitting], [group_of[i] for i in fitting], state.step
                )
            except NothingFitsError as error:
                dropped += error.sequences
                continue
            dropped += fitted.dropped
            results += fitted.result
            norms.append(optimizer.update())
        if not results:
            raise NothingFitsError(dropped, state.step + 1)
        trained = [i for i, e in enumerate(examples) if e.sequence not in dropped]
        return Updates([examples[i] for i in trained], [group_of[i] for i in trained], tuple(dropped), results, norms)

    def _with_teacher(self, state: TrainState, examples: Sequence[Example], group_of: Sequence[int]) -> list[Example]:
        """Return the examples with the teacher's logprobs of their hinted calls. Calls that do not fit into memory are
        left out."""
        indexed_calls = [(i, call) for i, e in enumerate(examples) for call in e.hinted_calls]
        if not indexed_calls or not self.config.distill.weight or self.config.loss.type == "sft":
            return list(examples)
        average = state.average if self.config.distill.teacher == "average" else None
        with nullcontext() if average is None else self.model.with_adapter(average):
            try:
                calls = [Example(call.sequence, 0.0) for _, call in indexed_calls]
                group_of_call = [group_of[i] for i, _ in indexed_calls]
                fitted = self._run_fitting(self.passes.teacher_logprobs, calls, group_of_call, state.step)
            except NothingFitsError:
                return list(examples)  # the error is logged for each of them
        logprobs_of = {id(e.sequence): fitted.result[n] for n, e in enumerate(fitted.examples)}
        parts: dict[int, list[tuple[HintedCall, TeacherLogprobs]]] = {}
        for i, call in indexed_calls:
            if (teacher_logprobs := logprobs_of.get(id(call.sequence))) is not None:
                parts.setdefault(i, []).append((call, teacher_logprobs))
        return [
            dataclasses.replace(e, hinted_calls=(), teacher=join_logprobs(e.sequence.trained_tokens, parts.get(i, ())))
            for i, e in enumerate(examples)
        ]

    def _average_adapter(self, state: TrainState, weights: Weights) -> Weights | None:
        """Return the running average of the adapters after a step that ended in `weights`; `None` if the settings have
        no teacher that needs it."""
        distill = self.config.distill
        if not distill.weight or distill.teacher != "average":
            return None
        before = state.average or state.weights
        return {name: torch.lerp(before[name].float(), w.float(), _AVERAGE_RATE) for name, w in weights.items()}

    def _too_long(self, examples: Sequence[Example]) -> list[TokenSequence]:
        """Return the sequences that the model would cut off."""
        too_long = [e.sequence for e in examples if self.model.longest and len(e.sequence.ids) > self.model.longest]
        for sequence in too_long:
            logger.error(
                "sequence dropped: the trainer's model cuts it off; lower vllm.max_model_len or raise "
                "trainer.unsloth.max_seq_length",
                trajectory=sequence.trajectory,
                tokens=len(sequence.ids),
                limit=self.model.longest,
            )
        return too_long

    def _measure(self, state: TrainState, updates: Updates) -> dict[str, float]:
        """Return the metrics of a step and its checks.

        Raises `SamplerMismatchError` where the sampler's logprobs are not the trainer's."""
        passes = self.passes
        metrics = passes.summary(updates.results, updates.examples, state.step, len(updates.norms))
        self._check_sampler_agrees(metrics, state.step)
        step = checks.Step(
            state,
            updates.examples,
            updates.group_of,
            first_logprobs(updates.results, updates.examples),
            passes.packing_of(updates.examples, updates.group_of),
            metrics["tokens_forward"],
        )
        share = self.config.check_share / 2
        metrics["tokens_checked"] = 0.0
        for check in (checks.compare_earlier_versions, checks.kl_to_base):
            result = check_within_memory(passes.budget, passes.free, partial(check, passes, step, share))
            result["tokens_checked"] = metrics["tokens_checked"] + result.get("tokens_checked", 0.0)
            metrics |= result
        self._check_sampler_agrees(metrics, state.step)
        return metrics | {
            "grad_norm": float(np.mean(updates.norms)),
            "updates": float(len(updates.norms)),
            "sequences_dropped": float(len(updates.dropped)),
            "tokens_dropped": float(sum(s.trained_tokens for s in updates.dropped)),
        }

    def _speed(self, metrics: Mapping[str, float], compute_s: float) -> dict[str, float]:
        """Return the speed of a step that computed for `compute_s` seconds, from its `metrics`. `mfu` is the share of
        the GPU's peak rate that the products of the base model's weights took, forward and backward; attention is not
        counted."""
        speed = {
            "compute_s": compute_s,
            "trained_tokens_per_s": self.config.optimizer.epochs * metrics["tokens"] / compute_s,
            "forward_tokens_per_s": metrics["tokens_forward"] / compute_s,
        }
        speed["tflop_per_s"] = speed["forward_tokens_per_s"] * self.passes.cost.per_token / 1e12
        if self.model.device.type == "cuda" and (peak := peak_tflop_per_s(torch.cuda.get_device_name())):
            speed["mfu"] = speed["tflop_per_s"] / (peak * self.passes.processes)
        return speed

    def _check_sampler_agrees(self, metrics: Mapping[str, float], step: int) -> None:
        """Raise `SamplerMismatchError` if recorded and recomputed logprobs differ by more than `trainer.logprob_bound`.
        `metrics` has a difference for the tokens of earlier versions, of this version, for both, or for none."""
        bound = logprob_bound_for(self.config, self.model.dtype)
        for name, tokens in (
            ("sampler_logprob_diff", "of tokens of earlier versions, recomputed with those"),
            ("on_policy_logprob_diff", "of tokens sampled by this version"),
        ):
            difference = metrics.get(name, 0.0)
            if not difference <= bound:  # NaN is refused too
                raise SamplerMismatchError(
                    f"step {step + 1} is not taken: the sampler's logprobs and the trainer's differ by "
                    f"{difference:.3g} nats on average {tokens}, and trainer.logprob_bound is {bound:g}. Check that "
                    "the inference server runs this base model in the same type, with --logprobs-mode "
                    "processed_logprobs, and serves the adapter that its name says"
                )
