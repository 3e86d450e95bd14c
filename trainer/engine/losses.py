"""TRL's GRPO losses over captured tokens.

`CapturedGRPOTrainer` is TRL's `GRPOTrainer` with the generation taken out: batches come from scored groups, per-token
logprobs from our own forward pass (`Engine.logprobs`), and the step is driven from outside, one call per optimizer
step, so that no step pays for a training loop's set-up. Clipping, loss types, KL and corrections are TRL's.

Shape letters as in `trainer.batches.packing`: S sequences, K most trained tokens in one of them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from pipeline.config import ConfigError, TrainerConfig
from trainer.batches.groups import Example


@contextmanager
def without_vllm() -> Iterator[None]:
    """Hide vLLM while TRL is imported. TRL imports it if it is installed, and the trainer, which never samples, saves
    the seconds and the memory. An entry of `None` in `sys.modules` makes Python treat a module as missing."""
    loaded = sys.modules.get("vllm")
    sys.modules["vllm"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if loaded is None:
            del sys.modules["vllm"]
        else:
            sys.modules["vllm"] = loaded


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Ignore warnings while TRL and its libraries are imported."""
    with warnings.catch_warnings(), without_vllm():
        warnings.simplefilter("ignore")
        yield


with quiet_imports():
    from trl import GRPOConfig, GRPOTrainer

transformers_logging.disable_progress_bar()

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
"""TRL's loss types that work on captured tokens."""


RELIED_ON = {
    "self._get_per_token_logps_and_entropies(": "is where the loss gets its logprobs; overridden to hand out ours",
    "self.beta": "is read at each loss, so it can be set after the constructor, which would add a second adapter",
    "self.use_vllm": "is read at each loss, so it can be set after the constructor, which would start vLLM",
    "self.aux_loss_enabled": "is read at each loss; off, for routers have no adapter",
    "self.current_gradient_accumulation_steps": "divides the loss; 1, since passes are weighted by `micro_batch_share`",
    "self.entropy_coef": "weighs the entropy bonus; set for each pass",
    "self._metrics[mode]": "collects TRL's metrics, a value per pass",
    'inputs["importance_sampling_ratio"]': "is the sampler correction, computed by us",
    'inputs.get("old_per_token_logps")': "may be missing: then the ratio is that of the trainer to itself",
    'inputs.get("sampling_per_token_logps"': "is what the off-policy mask compares with",
    'inputs["ref_per_token_logps"]': "is the base model's, for the KL term",
    'inputs["num_items_in_batch"]': "is the whole batch's token count, by which three losses divide",
}
"""Internals of `GRPOTrainer._compute_loss` that this module relies on, besides TRL's documented interface."""

_PAD = "<pad>"


def _no_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a single token: TRL requires one, and nothing is tokenized here."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({_PAD: 0}, unk_token=_PAD)),
        pad_token=_PAD,
        eos_token=_PAD,
    )


LOSS_OPTIONS = (
    "sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
    "vespo_lambda_neg",
)  # fmt: skip
"""TRL's constants of single loss types."""


def check_settings(config: TrainerConfig) -> None:
    """Raise `ConfigError` where settings of the loss are unknown or contradict each other."""
    if config.loss.type not in LOSS_TYPES:
        raise ConfigError(f"trainer.loss.type: {config.loss.type!r} is none of {', '.join(LOSS_TYPES)}")
    if config.loss.type == "vespo" and config.loss.importance_sampling.startswith("sequence"):
        # TRL checks this where it samples itself, which it does not here.
        raise ConfigError(
            f"trainer.loss.importance_sampling: loss type `vespo` takes `none`, `token_truncate` or `token_mask`, "
            f"not {config.loss.importance_sampling!r}"
        )
    if unknown := config.loss.options.keys() - set(LOSS_OPTIONS):
        raise ConfigError(
            f"trainer.loss.options: {', '.join(sorted(unknown))} is none of {', '.join(LOSS_OPTIONS)}"
        )


CISPO_EPSILON_HIGH = 5.0
"""CISPO's bound on the ratio, from its paper and TRL's guide. For CISPO, epsilon is the bound itself, not added to
1."""


def grpo_config(config: TrainerConfig, output: Path, *, cpu: bool) -> GRPOConfig:
    """TRL's configuration from the trainer's settings. Raises `ConfigError` where they contradict each other."""
    check_settings(config)
    high = config.loss.epsilon_high
    return GRPOConfig(
        output_dir=str(output),
        use_cpu=cpu,
        seed=config.seed,
        learning_rate=config.optimizer.learning_rate,
        loss_type=config.loss.type,
        beta=0.0,  # set after construction, see `CapturedGRPOTrainer`
        epsilon=config.loss.epsilon,
        epsilon_high=CISPO_EPSILON_HIGH if high is None and config.loss.type == "cispo" else high,
        importance_sampling_level=config.loss.importance_level,
        max_completion_length=config.loss.max_completion_length,
        vllm_importance_sampling_correction=config.loss.importance_sampling != "none",
        vllm_importance_sampling_mode=(
            "token_truncate" if config.loss.importance_sampling == "none" else config.loss.importance_sampling
        ),
        vllm_importance_sampling_clip_max=config.loss.importance_clip,
        vllm_importance_sampling_clip_min=config.loss.importance_clip_min,
        delta=config.loss.delta,
        off_policy_mask_threshold=config.loss.off_policy_mask,
        entropy_coef=config.loss.entropy_coef,
        use_bias_correction_kl=config.loss.kl_unbiased,
        **config.loss.options,
        scale_rewards=config.loss.advantage_scaling,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=2,
        num_generations=2,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )


class CapturedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """TRL's loss on batches that were sampled elsewhere."""

    def __init__(self, model: torch.nn.Module, args: GRPOConfig, beta: float = 0.0) -> None:
        # TRL casts the adapter over a base in four bits to bfloat16, where an update of a 256th of a weight is lost.
        adapter = {p: p.data for p in model.parameters() if p.requires_grad}
        super().__init__(
            model=model,
            reward_funcs=[_no_reward],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [""]}),
            processing_class=_no_tokenizer(),
        )
        for parameter, data in adapter.items():
            parameter.data = data
        # After the constructor, which would add a second adapter for the reference model; ours is the base model.
        self.beta = beta
        # After the constructor, which would start vLLM: the correction is on although TRL does not sample.
        self.use_vllm = args.vllm_importance_sampling_correction
        # TRL adds the load-balancing loss of a mixture's router to the policy's; routers have no adapter here.
        self.aux_loss_enabled = False
        # A step is one loss over the whole batch; micro-batches are weighted by `Engine`, which knows their sizes.
        self.current_gradient_accumulation_steps = 1
        self._logprobs: tuple[torch.Tensor, torch.Tensor] | None = None

    def get_train_dataloader(self) -> DataLoader[Any]:
        raise NotImplementedError("batches are scored groups, handed to `loss`")

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        return generation_batch

    def _get_per_token_logps_and_entropies(
        self, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        assert self._logprobs is not None, "the loss is computed through `loss`"
        return (*self._logprobs, None)

    def loss(
        self,
        inputs: dict[str, torch.Tensor],
        logprobs_SK: torch.Tensor,
        entropies_SK: torch.Tensor,
        bonus_share: float = 1.0,
    ) -> torch.Tensor:
        """TRL's loss of a batch whose logprobs are computed already. `bonus_share` scales the entropy bonus, which TRL
        always takes as the mean over the tokens that it is given."""
        self._logprobs = (logprobs_SK, entropies_SK)
        self.entropy_coef = self.args.entropy_coef * bonus_share
        try:
            loss: torch.Tensor = self.compute_loss(self.model, inputs)
        finally:
            self._logprobs = None
        return loss

    def take_metrics(self) -> dict[str, list[float]]:
        """TRL's own metrics since the last call, a value per pass."""
        out = {k: [float(v) for v in values] for k, values in self._metrics["train"].items()}
        self._metrics["train"].clear()
        return out


def averages(parts: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """The mean of each of TRL's metrics over all passes; those without a finite value are left out."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, found in part.items():
            values.setdefault(name, []).extend(found)
    return {k: float(np.nanmean(v)) for k, v in values.items() if np.isfinite(v).any()}


def _no_reward(prompts: Sequence[Any], **_: Any) -> list[None]:
    raise NotImplementedError("rewards come with the groups")


def importance_ratio(
    logprobs_SK: torch.Tensor,
    sampled_SK: torch.Tensor,
    mask_SK: torch.Tensor,
    mode: str,
    maximum: float,
    minimum: float | None = None,
) -> torch.Tensor:
    """TRL's sampler correction, [S, K] or [S, 1]: trainer over sampler probability, truncated to `minimum` …
    `maximum` or masked outside of it.

    A token whose sampler logprob is NaN counts as ratio 1."""
    difference = torch.nan_to_num((logprobs_SK.detach() - sampled_SK) * mask_SK, nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    if mode.endswith("truncate"):
        return torch.clamp(ratio, min=minimum, max=maximum)
    outside = ratio > maximum
    if minimum is not None:
        outside |= ratio < minimum
    return ratio.masked_fill(outside, 0.0)


def inputs_of(
    examples: Sequence[Example],
    logprobs_SK: torch.Tensor,
    *,
    config: TrainerConfig,
    items_in_batch: int,
    reference_SK: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """The inputs of TRL's loss for `examples`: the trained tokens only, since the forward pass has used the context.

    Without a sampler correction the clipped probability ratio is to the recorded logprobs. With one it is to the
    policy before the step's first update (`Example.old_logprobs`), and that policy's ratio to the sampler is the
    correction: both are the same in every update of the step. In a step of one update the old policy is the present
    one, and the clipped ratio is 1."""
    device = logprobs_SK.device
    shape = logprobs_SK.shape
    ids_SK = np.zeros(shape, np.int64)
    mask_SK = np.zeros(shape, np.float32)
    sampled_SK = np.full(shape, np.nan, np.float32)
    old_SK = logprobs_SK.detach().clone()
    for row, example in enumerate(examples):
        sequence = example.sequence
        n = sequence.trained_tokens
        ids_SK[row, :n] = sequence.ids[sequence.loss_mask]
        mask_SK[row, :n] = 1.0
        sampled_SK[row, :n] = sequence.logprobs[sequence.loss_mask]
        if example.old_logprobs is not None:
            old_SK[row, :n] = torch.from_numpy(example.old_logprobs)
    several_updates = examples[0].old_logprobs is not None
    mask = torch.from_numpy(mask_SK).to(device)
    sampled = torch.from_numpy(sampled_SK).to(device)
    inputs = {
        "prompt_ids": torch.zeros((shape[0], 0), dtype=torch.long, device=device),
        "prompt_mask": torch.zeros((shape[0], 0), dtype=torch.long, device=device),
        "completion_ids": torch.from_numpy(ids_SK).to(device),
        "completion_mask": mask,
        "advantages": torch.tensor([e.advantage * e.weight for e in examples], device=device),
        "num_items_in_batch": torch.tensor(float(items_in_batch), device=device),
    }
    if config.loss.importance_sampling == "none":
        # Where the sampler's logprob is unknown the old policy stands in for it.
        inputs["old_per_token_logps"] = torch.where(sampled.isnan(), old_SK, sampled)
    else:
        inputs["importance_sampling_ratio"] = importance_ratio(
            old_SK,
            sampled,
            mask,
            config.loss.importance_sampling,
            config.loss.importance_clip,
            config.loss.importance_clip_min,
        )
        if several_updates:
            inputs["old_per_token_logps"] = old_SK
    if config.loss.off_policy_mask is not None:
        inputs["sampling_per_token_logps"] = sampled
    if reference_SK is not None:
        inputs["ref_per_token_logps"] = reference_SK
    return inputs


def micro_batch_share(
    loss_type: str, sequences: int, all_sequences: int, tokens: int, all_tokens: int
) -> float:
    """Weight of a micro-batch's loss in the batch's loss. With it the losses add up to that of one single pass."""
    if loss_type in ("dapo", "cispo", "vespo"):
        return 1.0  # divided by the whole batch's token count already
    if loss_type == "bnpo":
        return tokens / max(all_tokens, 1)
    return sequences / all_sequences
