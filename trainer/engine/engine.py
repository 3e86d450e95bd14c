"""The model and its one live adapter: forward passes, gradients, optimizer state.

One engine holds one base model. Several policies over it take turns: an adapter is a small dictionary of tensors that
is copied in before a step and out after it. Everything here computes and blocks; the service calls it in a thread.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from peft.utils import get_peft_model_state_dict

from pipeline.config import ConfigError, TrainerConfig, config_hash
from pipeline.telemetry.logs import get_logger
from trainer.batches.groups import Example
from trainer.batches.packing import Cost, Layout, MicroBatch, micro_batches, sharing_pays
from trainer.batches.sequences import TokenSequence
from trainer.engine import checks, fitting
from trainer.engine import losses as grpo
from trainer.engine.budget import Budget
from trainer.engine.forward import Forward
from trainer.engine.loading import device_for, load
from trainer.engine.measure import Measured
from trainer.engine.memory import Memory, measure
from trainer.engine.optimizer import optimizer_of
from trainer.engine.parallel import Job, ProcessGroup
from trainer.engine.state import (
    SamplerMismatchError,
    StepResult,
    TrainState,
    UntrainableError,
    Weights,
    get_rng,
    set_rng,
)
from trainer.engine.verify import bound_of, verify

log = get_logger("trainer.engine.engine")

_VOCAB_CHUNK = 32_000_000
"""Most logits (tokens times vocabulary) that are held at once; beyond it they are computed again for the gradient."""

_LEAST_BUDGET = 64
"""Tokens below which passes are not cut smaller to give each process one."""


def fixed_settings(config: TrainerConfig) -> dict[str, object]:
    """The settings that a model is loaded with: policies share an engine where all of them are equal."""
    names = (
        "engine", "dtype", "unsloth.load_in_4bit", "unsloth.max_seq_length", "memory.attention", "lora.rank", "lora.alpha",
        "lora.targets", "seed", "threads", "memory.gradient_checkpointing",
    )  # fmt: skip
    return {name: operator.attrgetter(name)(config) for name in names}


@dataclass(frozen=True, eq=False)
class Part:
    """What one process computed of a batch, beside its gradients."""

    measured: Measured
    trl: dict[str, list[float]]
    """TRL's own metrics, a value per pass."""
    tokens_forward: int
    micro_batches: int


class Engine:
    """See the module; `base` is a folder or hub name."""

    def __init__(self, base: str, config: TrainerConfig, scratch: Path) -> None:
        if config.loss.type not in grpo.LOSS_TYPES:
            raise ConfigError(
                f"trainer.loss.type: {config.loss.type!r} is none of {', '.join(grpo.LOSS_TYPES)}"
            )
        self.base, self.config = base, config
        self.device = device_for(config)
        self._use_threads()
        loaded = load(base, config, self.device)
        self.model, self.lora, self.checkpointing = loaded.model, loaded.lora, loaded.checkpointing
        self._scratch = scratch
        self._trainers: dict[str, grpo.CapturedGRPOTrainer] = {}
        self.number = 0
        """Its place among the engines of the trainer, the same in each of its processes."""
        self.process_group: ProcessGroup | None = None
        """The other processes that share this engine's passes."""
        self.budget = Budget(config.memory.tokens_per_batch)
        self.configure(config)
        inner = self.model.get_base_model()
        self.forward = Forward(inner)
        # Views of the adapter's parameters under PEFT's names; a step changes them in place.
        self._live: Weights = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.dtype: torch.dtype = self.forward.trunk.dtype
        self.vocabulary = int(inner.get_input_embeddings().weight.shape[0])
        text = self.forward.text
        self._size = (
            sum(p.numel() for p in self.model.parameters()) - inner.get_input_embeddings().weight.numel()
        )
        heads = getattr(text, "num_attention_heads", None) or 1
        width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
        self._cost = Cost.of(self._size, text.num_hidden_layers, width)
        self.verified = verify(self, shares_prefixes=loaded.prefix_sharing)
        """How the layouts compare with the model's own forward pass."""

    def configure(self, config: TrainerConfig) -> None:
        """Go on under other settings over the same model; what the model was built with must be the same."""
        if (changed := fixed_settings(config)) != (now := fixed_settings(self.config)):
            names = ", ".join(name for name in now if changed[name] != now[name])
            raise ConfigError(f"trainer: {names} can't be changed once the model is loaded")
        if config.loss.type not in grpo.LOSS_TYPES:
            raise ConfigError(
                f"trainer.loss.type: {config.loss.type!r} is none of {', '.join(grpo.LOSS_TYPES)}"
            )
        verified = getattr(self, "verified", None)
        if config.memory.packing == "prefix" and verified is not None and verified.layout != "prefix":
            raise ConfigError(
                f"trainer.memory.packing: prefixes can't be shared with {self.base}: {verified.why_padded}"
            )
        self.config = config
        self.budget.allow(config.memory.tokens_per_batch)
        key = config_hash(config)
        if key not in self._trainers:
            self._trainers[key] = grpo.CapturedGRPOTrainer(
                self.model,
                grpo.grpo_config(config, self._scratch, cpu=self.device.type == "cpu"),
                config.loss.beta,
            )
        self.trainer = self._trainers[key]
        self.model.train()

    def _use_threads(self) -> None:
        # PyTorch keeps this per thread, and the service's worker threads come and go.
        if torch.get_num_threads() != self.config.threads:
            torch.set_num_threads(self.config.threads)

    def plan_passes(self) -> Memory:
        """Measure what memory a pass takes. On CUDA the budget is bounded by what fits; on the CPU it is only said, since other
        processes come and go there."""
        memory = measure(self)
        fits = memory.tokens()
        if self.device.type == "cuda" and fits is not None:
            self.budget.bound(max(1, fits))
        log.info(
            "memory of a step", model=self.base, device=str(self.device), weights=memory.weights, per_token=memory.per_token,
            free=memory.free, tokens_that_fit=fits, token_budget=self.budget.tokens, step=memory.step(self.budget.tokens),
            gradient_checkpointing=self.checkpointing,
        )  # fmt: skip
        return memory

    # -- adapters ------------------------------------------------------------------------------------------------

    def initial_state(self) -> TrainState:
        """Step 0: PEFT's fresh adapter, which changes nothing."""
        weights = self.weights()
        return TrainState(0, weights, history={0: weights})

    def weights(self) -> Weights:
        """A copy of the live adapter."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._live.items()}

    def warm_up(self) -> None:
        """A step over a few tokens, thrown away: what PyTorch does once is done before the first real step."""
        state = self.initial_state()
        ids = np.arange(4, dtype=np.int32)
        sequence = TokenSequence(
            "warm-up", ids, ids > 0, np.full(4, np.nan, np.float32), np.zeros(4, np.int32), np.ones(4, np.float32)
        )  # fmt: skip
        self.step(state, [Example(sequence, 1.0), Example(sequence, -0.5)], [0, 0])
        self.load_adapter(state.weights)

    def load_adapter(self, weights: Weights) -> None:
        """Make `weights` the live adapter; raises `ValueError` where they are not of its shape."""
        live = self._live
        if live.keys() != weights.keys() or any(live[k].shape != weights[k].shape for k in live):
            raise ValueError("the adapter does not fit: was trainer.lora.rank or the base model changed?")
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(weights[name])

    @contextmanager
    def with_adapter(self, weights: Weights) -> Iterator[None]:
        """With `weights` as the live adapter for a while."""
        kept = self.weights()
        self.load_adapter(weights)
        try:
            yield
        finally:
            self.load_adapter(kept)

    # -- forward -------------------------------------------------------------------------------------------------

    def logprobs(
        self, layout: Layout, shape: tuple[int, int], *, entropy: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and entropies of the trained tokens, [S, K], zero where a sequence has fewer; nats, at the sampling
        temperature."""
        layout = layout.to(self.device)
        hidden_RLD = self.forward.hidden(layout, flex=self.config.memory.attention == "flex")
        logprobs_N, entropies_N = self.forward.scores(
            hidden_RLD[layout.rows_N, layout.cols_N],
            layout.targets_N,
            layout.temperatures_N,
            layout.cuts_N3,
            self.logits_at_once,
            # Where the entropy is only measured no gradient is kept for it.
            "trained" if entropy and self.config.loss.entropy_coef else "measured" if entropy else "none",
        )
        place = (layout.sequence_N, layout.slot_N)
        zeros = torch.zeros(shape, dtype=logprobs_N.dtype, device=self.device)
        return zeros.index_put(place, logprobs_N), zeros.index_put(place, entropies_N)

    @property
    def logits_at_once(self) -> int:
        """Positions whose logits are held at once."""
        return max(1, _VOCAB_CHUNK // self.vocabulary)

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, state: TrainState, examples: Sequence[Example], groups: Sequence[int]) -> StepResult:
        """One optimizer step over `examples`; `groups[i]` says which of them share prefixes. `state` itself stays as it
        was, so that a step that is abandoned leaves no trace.

        Sequences that do not fit into memory even alone are left out. Raises `UntrainableError` where none is left."""
        self._use_threads()
        began = time.perf_counter()
        self.load_adapter(state.weights)
        optimizer, scheduler = optimizer_of(self.config, self.parameters, state)
        set_rng(state.rng)
        optimizer.zero_grad(set_to_none=True)
        held = self.budget.tokens
        metrics, examples, groups, dropped = fitting.backward_what_fits(self, examples, groups, state.step)
        packing = self.packing_of(examples, groups)
        gradients = [p.grad for p in self.parameters]
        metrics |= fitting.check(
            self, lambda: checks.sampler_difference(self, state, examples, groups, packing)
        )
        if self.config.loss.beta == 0.0:
            metrics |= fitting.check(self, lambda: checks.kl_to_base(self, examples, groups, packing))
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient  # a check that ran out of memory cleared it
        self._hold_to_the_sampler(metrics, state.step)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.optimizer.max_grad_norm)
        if not torch.isfinite(norm):
            raise UntrainableError(f"gradient norm {norm} at step {state.step}: the step is not taken")
        optimizer.step()
        metrics["learning_rate"] = float(scheduler.get_last_lr()[0])
        scheduler.step()
        weights = self.weights()
        step = state.step + 1
        history = {s: w for s, w in state.history.items() if s >= step - self.config.max_staleness - 1}
        history[step] = weights
        after = TrainState(step, weights, optimizer.state_dict(), scheduler.state_dict(), get_rng(), history)
        compute = time.perf_counter() - began
        metrics |= {
            "grad_norm": float(norm),
            "compute_s": compute,
            "trained_tokens_per_s": metrics["tokens"] / compute,
            "forward_tokens_per_s": metrics["tokens_forward"] / compute,
        }
        if self.config.peak_tflops:
            # Forward, and backward through activations only: the base model's weights take no gradient.
            flops = 4 * self._size * metrics["tokens_forward"]
            metrics["mfu"] = flops / compute / (self.config.peak_tflops * 1e12)
        if self.budget.tokens == held and self.budget.step_taken():
            log.info("memory sufficed: going on with a larger token budget", budget=self.budget.tokens)
        return StepResult(after, metrics, dropped)

    def _hold_to_the_sampler(self, metrics: Mapping[str, float], step: int) -> None:
        """Raise `SamplerMismatchError` where recorded and recomputed logprobs differ by more than rounding explains."""
        bound = bound_of(self.config, self.dtype)
        for name, what in (("sampler_logprob_diff", "at the versions that sampled"),
                           ("on_policy_logprob_diff", "of tokens sampled by this version")):  # fmt: skip
            found = metrics.get(name, 0.0)
            if not found <= bound:
                raise SamplerMismatchError(
                    f"step {step + 1} is not taken: the sampler's logprobs and the trainer's differ by {found:.3g} nats on average "
                    f"{what}, and trainer.logprob_bound is {bound:g}. Check that the inference server runs this base model in the "
                    "same type, with --logprobs-mode processed_logprobs, and serves the adapter that its name says"
                )

    def backward(self, examples: Sequence[Example], groups: Sequence[int], step: int) -> dict[str, float]:
        """Add the gradient of the batch's loss to the live adapter's; metrics of the batch as seen from `step`."""
        if self.process_group is None:
            parts = [self.passes(examples, groups, self.budget.tokens)]
        else:
            self.process_group.send(
                Job(self.number, self.config, self.weights(), examples, groups, step, self.budget.tokens)
            )
            parts = self.process_group.all_reduce(
                lambda: self.passes(examples, groups, self.budget.tokens), self.parameters
            )
        sequences = [e.sequence for e in examples]
        laid_out = sum(p.tokens_forward for p in parts)
        return (
            Measured.of(p.measured for p in parts).summary(step)
            | grpo.averages([p.trl for p in parts])
            | {
                "tokens": float(self._tokens(sequences)),
                "tokens_forward": float(laid_out),
                "sequences": float(len(examples)),
                "micro_batches": float(sum(p.micro_batches for p in parts)),
                "token_budget": float(self.budget.tokens),
                "packing_ratio": sum(len(s.ids) for s in sequences) / max(laid_out, 1),
            }
        )

    def packing_of(self, examples: Sequence[Example], groups: Sequence[int]) -> Literal["prefix", "padded"]:
        """The layout in which a batch is trained."""
        packing = self.config.memory.packing if self.verified.layout == "prefix" else "padded"
        if packing != "auto":
            return packing
        return "prefix" if sharing_pays([e.sequence for e in examples], groups, self._cost) else "padded"

    def passes(self, examples: Sequence[Example], groups: Sequence[int], budget: int) -> Part:
        """This process's passes of the batch, of at most about `budget` tokens each."""
        sequences = [e.sequence for e in examples]
        packing = self.packing_of(examples, groups)
        batches = micro_batches(sequences, groups, budget, packing, self._cost)
        if self.process_group is not None:
            if len(batches) < self.process_group.size:
                size = sum(b.layout.ids_RL.numel() for b in batches)
                smaller = max(-(-size // self.process_group.size), _LEAST_BUDGET)
                batches = micro_batches(sequences, groups, min(budget, smaller), packing, self._cost)
            batches = self.process_group.partition(batches)
        total = self._tokens(sequences)
        measured = Measured()
        for batch in batches:
            with fitting.within_memory(batch):
                self._backward(batch, examples, total, measured)
        return Part(
            measured, self.trainer.take_metrics(), sum(b.layout.tokens for b in batches), len(batches)
        )

    @staticmethod
    def _tokens(sequences: Sequence[TokenSequence]) -> int:
        return sum(s.trained_tokens for s in sequences)

    def _backward(
        self, batch: MicroBatch, examples: Sequence[Example], total: int, measured: Measured
    ) -> None:
        inside = [examples[i].sequence for i in batch.indices]
        counts = [s.trained_tokens for s in inside]
        shape = (len(inside), max(counts))
        logprobs_SK, entropies_SK = self.logprobs(batch.layout, shape)
        reference = None
        if self.config.loss.beta != 0.0:
            with torch.no_grad(), self.model.disable_adapter():
                reference, _ = self.logprobs(batch.layout, shape, entropy=False)
        inputs = grpo.inputs_of(
            examples,
            batch.indices,
            logprobs_SK,
            config=self.config,
            items_in_batch=total,
            reference_SK=reference,
        )
        share = grpo.micro_batch_share(self.config.loss.type, len(inside), len(examples), sum(counts), total)
        # The bonus is the mean over the batch's tokens, whatever the loss type averages over.
        bonus = sum(counts) / total / share
        loss = self.trainer.loss(inputs, logprobs_SK, entropies_SK, bonus) * share
        loss.backward()
        measured.add(loss, logprobs_SK, inside, self.config.loss.importance_clip)
