"""The gradient of a batch's loss: forward and backward passes over its micro-batches, in one process or in several.

`trainer.engine.engine` asks for the work of a step. Rank 0 sends it as a `Job` to the other processes, if there are
any; each makes its own part of the passes, and their results are exchanged (`trainer.engine.parallel`).

Shape letters as in `trainer.batches.packing`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from pipeline.config import ConfigError, TrainerConfig
from pipeline.config.checks import check_trainer
from pipeline.telemetry.logs import get_logger
from trainer.batches.examples import Example
from trainer.batches.packing import Cost, MicroBatch, Packing, SharingLimits, micro_batches, sharing_pays
from trainer.distillation import teacher
from trainer.distillation.teacher import TeacherLogprobs
from trainer.engine.fitting import Budget, detect_out_of_memory
from trainer.engine.loss import Sums, means, policy_loss, supervised_loss
from trainer.engine.loss_inputs import distillation_loss, inputs_of
from trainer.engine.model import PolicyModel, shape_of
from trainer.engine.parallel import Job, ProcessGroup, Work
from trainer.engine.state import Logprobs
from trainer.engine.statistics import sampler_metrics
from trainer.engine.verify import verify

logger = get_logger("trainer.engine.passes")

_CPU_TOKENS = 1024
"""On CPU, rows share a pass only up to this number of tokens: their activations then stay in its cache."""
_IN_COMMON_ON_GPU = 512
"""Tokens that groups must have in common to share a row on a GPU, where each part of a row is a call of the attention
function in each layer: so many tokens take longer than the calls of a group of 8. By estimate: no GPU has run it."""
_LEAST_BUDGET = 64
"""Passes are made smaller so that each process has one, but not smaller than this number of tokens."""

IndexedLogprobs = dict[int, Logprobs]
"""Logprobs of an example's trained tokens, [k] in nats, by the example's index."""


def _attention_width(layer: Any) -> int:
    """Return the number of heads times the head dimension, by the configuration of a layer."""
    heads = getattr(layer, "num_attention_heads", None) or 1
    return int(heads * (getattr(layer, "head_dim", None) or layer.hidden_size // heads))


@dataclass(eq=False)
class PassResult:
    """One process's results of one update, besides its gradients."""

    tokens_forward: int
    """Tokens that went through the model, without padding."""
    micro_batches: int
    loss: float = 0.0
    logprobs: IndexedLogprobs = field(default_factory=dict)
    sums: list[Sums] = field(default_factory=list)
    """The loss's own metrics, of each pass."""


class Passes:
    """Forward and backward passes of a model, with the loss on it.

    `process_group` and `number` as `Engine`'s. Raises `RefusedError` if no pass gives the model's own logprobs."""

    def __init__(self, model: PolicyModel, process_group: ProcessGroup | None = None, number: int = 0) -> None:
        check_trainer(model.config)
        self.model, self._process_group, self._number = model, process_group, number
        self.budget = Budget(model.config.memory.tokens_per_batch, model.save_memory)
        # Layers may differ in their heads, as Gemma 4's do.
        self.cost = Cost.of(
            model.multiplied_parameters, sum(_attention_width(c) for c in model.forward.text.per_layer_config)
        )
        self.verified = verify(model)
        """How the layouts compare with the model's own forward pass."""

    @property
    def config(self) -> TrainerConfig:
        return self.model.config

    @property
    def processes(self) -> int:
        """Number of processes that share the passes."""
        return self._process_group.size if self._process_group is not None else 1

    def configure(self, config: TrainerConfig) -> None:
        """Apply other settings to the same model.

        Raises `ConfigError` where they contradict each other, or change what the model was loaded with."""
        if config.memory.packing == "prefix" and self.verified.layout != "prefix":
            raise ConfigError(
                f"trainer.memory.packing: prefixes can't be shared with {self.model.base}: {self.verified.why_padded}"
            )
        check_trainer(config)
        self.model.configure(config)
        self.budget.set_limit(config.memory.tokens_per_batch)

    def gradients(self, examples: Sequence[Example], group_of: Sequence[int]) -> list[PassResult]:
        """Add the gradient of the batch's loss to the gradients of the live adapter. Returns each process's result."""
        return self._in_every_process(examples, group_of, "gradients")

    def logprobs(self, examples: Sequence[Example], group_of: Sequence[int], *, base: bool = False) -> IndexedLogprobs:
        """Return the logprobs of each example's trained tokens under the live adapter, or with `base` those under the
        base model."""
        return self.counted_logprobs(examples, group_of, base=base)[0]

    def counted_logprobs(
        self,
        examples: Sequence[Example],
        group_of: Sequence[int],
        packing: Packing | None = None,
        *,
        base: bool = False,
    ) -> tuple[IndexedLogprobs, int]:
        """Return `logprobs`, computed in the layout `packing`, and the number of tokens of its passes."""
        work: Work = "base_logprobs" if base else "logprobs"
        parts: list[tuple[IndexedLogprobs, int]] = self._in_every_process(examples, group_of, work, packing)
        computed = {index: logprobs for of_process, _ in parts for index, logprobs in of_process.items()}
        return computed, sum(tokens for _, tokens in parts)

    def teacher_logprobs(self, examples: Sequence[Example], group_of: Sequence[int]) -> dict[int, TeacherLogprobs]:
        """Return the logprobs of each example by the teacher (`trainer.distill.teacher`), by its index. The live
        adapter has to be the teacher's: the policy's or the average."""
        parts: list[dict[int, TeacherLogprobs]] = self._in_every_process(examples, group_of, "teacher_logprobs")
        return {index: logprobs for part in parts for index, logprobs in part.items()}

    def _in_every_process(
        self, examples: Sequence[Example], group_of: Sequence[int], work: Work, packing: Packing | None = None
    ) -> list[Any]:
        """Let all processes do `work` over a batch, in the layout `packing` or the one it is trained in. Returns the
        result of each process (`_own_part`)."""
        weights = {} if self._process_group is None else self.model.weights()
        packing = packing or self.packing_of(examples, group_of)
        budget, checkpointing = self.budget.tokens, self.model.checkpointing
        job = Job(self._number, self.config, weights, examples, group_of, budget, packing, work, checkpointing)
        if self._process_group is not None:
            self._process_group.send(job)
        return self._with_others(job)

    def _with_others(self, job: Job) -> list[Any]:
        """Compute this process's part of `job`, then exchange results with the other processes: rank 0 comes here from
        `_in_every_process`, the others from `take_part`. Returns the result of each process; gradients are summed."""
        work = partial(self._own_part, job)
        if self._process_group is None:
            return [work()]
        parameters = self.model.parameters if job.work == "gradients" else ()
        return self._process_group.all_reduce(work, parameters, together=self.model.sharded)

    def take_part(self, job: Job) -> None:
        """Do a worker process's part of `job`. A failure is logged; the process that sent the job raises it."""
        self.configure(job.config)
        if job.checkpointing:
            self.model.save_memory()
        self.model.load_adapter(job.weights)
        self.model.peft.zero_grad(set_to_none=True)
        try:
            self._with_others(job)
        except (RuntimeError, ValueError) as error:
            logger.warning("part of a step failed", error=f"{type(error).__name__}: {error}"[:500])
            self.free()

    def free(self) -> None:
        """Release the memory that a failed pass holds. Call it after the `except` block, because the error's traceback
        holds tensors."""
        self.model.peft.zero_grad(set_to_none=True)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def packing_of(self, examples: Sequence[Example], group_of: Sequence[int]) -> Packing:
        """Return the layout in which a batch is trained."""
        packing = self.config.memory.packing if self.verified.layout == "prefix" else "padded"
        if any(e.sequence.images for e in examples):
            return "padded"  # the model itself gives positions to the tokens of an image, row by row
        if packing != "auto":
            return packing
        sequences = [e.sequence for e in examples]
        return "prefix" if sharing_pays(sequences, group_of, self.cost, self._limits) else "padded"

    @property
    def _limits(self) -> SharingLimits:
        """What may share a pass or a row on this device. With eager attention no two groups share a row."""
        if self.model.device.type == "cpu":
            limits = SharingLimits(of_pass=_CPU_TOKENS, of_row=_CPU_TOKENS)
        else:
            limits = SharingLimits(of_row=sys.maxsize, in_common=_IN_COMMON_ON_GPU)
        # Eager attention computes all pairs of a row.
        return replace(limits, of_row=0) if self.model.forward.attention == "eager" else limits

    def _own_batches(self, job: Job) -> list[MicroBatch]:
        """Return this process's passes of a job. All processes compute the same division. If there are fewer passes
        than processes, the batch is divided into smaller ones."""
        sequences = [e.sequence for e in job.examples]
        batches = micro_batches(sequences, job.group_of, job.budget, job.packing, self._limits)
        if self._process_group is None:
            return batches
        if len(batches) < self.processes:
            # Groups that share a row are divided first: each has a row of its own.
            limits = replace(self._limits, of_row=0)
            batches = micro_batches(sequences, job.group_of, job.budget, job.packing, limits)
        if len(batches) < self.processes:
            # Then the groups themselves are divided.
            size = sum(b.layout.ids_RL.numel() for b in batches)
            smaller = min(job.budget, max(-(-size // self.processes), _LEAST_BUDGET))
            batches = micro_batches(sequences, job.group_of, smaller, job.packing, limits)
        return self._process_group.partition(batches, even=self.model.sharded)

    def _own_part(self, job: Job) -> Any:
        """Return the result of this process's passes, by `job.work`: a `PassResult`; logprobs with the number of tokens
        of the passes; or the teacher's logprobs."""
        batches, sequences = self._own_batches(job), [e.sequence for e in job.examples]
        if job.work == "gradients":
            return self.own_gradients(batches, job.examples)
        distill = self.config.distill
        by_base = job.work == "base_logprobs" or (job.work == "teacher_logprobs" and distill.teacher == "base")
        with self.model.peft.disable_adapter() if by_base else nullcontext():
            if job.work == "teacher_logprobs":
                top_k = distill.top_k if distill.divergence == "reverse_kl" else 0
                return self.model.teacher_logprobs_of(batches, sequences, top_k)
            logprobs = self.model.logprobs_of(batches, sequences)
        return logprobs, sum(b.layout.tokens for b in batches if not b.is_filler)

    def own_gradients(self, batches: Sequence[MicroBatch], examples: Sequence[Example]) -> PassResult:
        """Make this process's forward and backward passes, and return their result. `examples`: the whole batch."""
        tokens = sum(e.sequence.trained_tokens for e in examples)
        counted = [b for b in batches if not b.is_filler]
        result = PassResult(sum(b.layout.tokens for b in counted), len(counted))
        for batch in batches:
            with detect_out_of_memory(batch), self.model.forward.one_pass():
                self._backward(batch, examples, tokens, result)
        return result

    def _backward(self, batch: MicroBatch, examples: Sequence[Example], tokens: int, result: PassResult) -> None:
        """Make one forward and backward pass, and add its figures to `result`. `tokens`: number of trained tokens of
        the whole batch."""
        own = [examples[i] for i in batch.indices]
        shape = shape_of([e.sequence for e in own])
        teacher_logprobs = [e.teacher for e in own]
        logprobs_SK, entropies_SK, divergences_SK = self.model.logprobs(
            batch.layout, shape, teacher_logprobs=teacher_logprobs
        )
        reference_SK = None
        if self.config.loss.beta != 0.0 and self.config.loss.type != "sft":
            with torch.no_grad(), self.model.peft.disable_adapter():
                reference_SK = self.model.logprobs(batch.layout, shape, entropy=False)[0]
        if batch.is_filler:
            # This process has fewer passes than others. With a divided model all take part in each pass, backward too:
            # it makes one whose gradient is 0.
            (0.0 * logprobs_SK.nan_to_num()).sum().backward()
            return
        loss_inputs = inputs_of(
            own, logprobs_SK, config=self.config, sequences=len(examples), tokens=tokens, reference_SK=reference_SK
        )
        if self.config.loss.type == "sft":
            loss = supervised_loss(loss_inputs, logprobs_SK)
        else:
            loss, sums = policy_loss(self.config.loss, loss_inputs, logprobs_SK, entropies_SK)
            result.sums.append(sums)
            taught = any(logprobs is not None for logprobs in teacher_logprobs)
            if taught and self.config.distill.divergence == "reverse_kl":
                loss = loss + distillation_loss(own, divergences_SK, loss_inputs, self.config)
        loss.backward()
        result.loss += float(loss.detach())
        computed = logprobs_SK.detach().cpu().numpy()
        for row, i in enumerate(batch.indices):
            result.logprobs[i] = computed[row, : examples[i].sequence.trained_tokens]

    def summary(
        self, results: Sequence[PassResult], examples: Sequence[Example], step: int, updates: int
    ) -> dict[str, float]:
        """Return the metrics of a step of so many `updates` over `examples`, from the results of all their passes.
        `step`: that of the policy before it."""
        sequences = [e.sequence for e in examples]
        laid_out = sum(r.tokens_forward for r in results)
        before = first_logprobs(results, examples)
        metrics = sampler_metrics(sequences, before, step, self.config.loss.importance_clip)
        metrics |= teacher.metrics([e.teacher for e in examples], before)
        return (
            metrics
            | means([sums for r in results for sums in r.sums])
            | {
                "loss": sum(r.loss for r in results) / updates,
                "tokens": float(sum(s.trained_tokens for s in sequences)),
                "tokens_forward": float(laid_out),
                "sequences": float(len(examples)),
                "micro_batches": float(sum(r.micro_batches for r in results)),
                "token_budget": float(self.budget.tokens),
                "packing_ratio": self.config.optimizer.epochs * sum(len(s.ids) for s in sequences) / max(laid_out, 1),
            }
        )


def first_logprobs(results: Sequence[PassResult], examples: Sequence[Example]) -> list[Logprobs]:
    """Return the logprobs of each example by the policy before the first update: those of the passes (`results`) if
    there was one update, else those that were computed before it."""
    computed = {index: logprobs for result in results for index, logprobs in result.logprobs.items()}
    return [computed[i] if e.old_logprobs is None else e.old_logprobs for i, e in enumerate(examples)]
