"""TRL's GRPO losses on captured tokens.

`CapturedGRPOTrainer` is TRL's `GRPOTrainer` without generation. Batches come from scored groups and per-token logprobs
from our own forward pass (`PolicyModel.logprobs`). The caller takes one loss at a time, so TRL's training loop is not
used. Clipping, loss types, KL and corrections are TRL's code.

Shape letters as in `trainer.batches.packing`: S sequences, K largest number of trained tokens in one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
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

from pipeline.config import TrainerConfig
from pipeline.config.checks import check_trainer
from trainer.batches.groups import Example
from trainer.engine.trl_source import GRPOConfig, GRPOTrainer, require_own

transformers_logging.disable_progress_bar()

TRL_INTERNALS = {
    "self._get_per_token_logps_and_entropies(": "gives the loss its logprobs; overridden to return ours",
    "self.beta": "is read at each loss, so it can be set after the constructor, which would add a second adapter",
    "self.use_vllm": "is read at each loss, so it can be set after the constructor, which would start vLLM",
    "self.aux_loss_enabled": "is read at each loss; switched off, because routers have no adapter",
    "self.current_gradient_accumulation_steps": "divides the loss; 1, because `micro_batch_share` weights the passes",
    "self.entropy_coef": "weights the entropy bonus; set for each pass",
    "self._metrics[mode]": "collects TRL's metrics, one value per pass",
    'inputs["importance_sampling_ratio"]': "is the importance weight, computed by `importance_ratio`",
    'inputs.get("old_per_token_logps")': "may be missing; the probability ratio is then 1",
    'inputs.get("sampling_per_token_logps"': "is compared with the logprobs by the off-policy mask",
    'inputs["ref_per_token_logps"]': "are the base model's logprobs, for the KL term",
    'inputs["num_items_in_batch"]': "is the token count of the whole batch, by which three losses divide",
}
"""Undocumented code of `GRPOTrainer._compute_loss` that this module relies on, and why. A test looks for each entry."""

_PAD = "<pad>"


def _no_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of a single token. TRL requires a tokenizer, but nothing is tokenised here."""
    tokenizer = Tokenizer(WordLevel({_PAD: 0}, unk_token=_PAD))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_PAD)


CISPO_EPSILON_HIGH = 5.0
"""Bound on CISPO's ratio, from the paper and TRL's guide. CISPO's epsilon is the bound itself, not added to 1."""


def grpo_config(config: TrainerConfig, output: Path, *, cpu: bool) -> GRPOConfig:
    """Translate the settings to TRL's. `output` is a folder that TRL requires.

    Raises `ConfigError` if settings contradict each other."""
    check_trainer(config)
    high = config.loss.epsilon_high
    return GRPOConfig(
        output_dir=str(output),
        use_cpu=cpu,
        seed=config.seed,
        loss_type="dapo" if config.loss.type == "sft" else config.loss.type,
        beta=0.0,  # set after construction by `CapturedGRPOTrainer`
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
    """TRL's loss on batches that were sampled elsewhere. `beta` is the weight of the KL term.

    Raises `ConfigError` if another library put its own loss in the place of TRL's."""

    def __init__(self, model: torch.nn.Module, args: GRPOConfig, beta: float = 0.0) -> None:
        require_own(type(self), type(args))
        # TRL casts the adapter of a base model in four bits to bfloat16, which rounds away updates below 1/256 of a
        # weight. Keep its tensors to restore them.
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
        # Set after the constructor, which would add a second adapter as reference model; ours is the base model.
        self.beta = beta
        # Set after the constructor, which would start vLLM. It makes TRL apply the importance weights.
        self.use_vllm = args.vllm_importance_sampling_correction
        # TRL would add the routers' load-balancing loss to the policy's; routers have no adapter here.
        self.aux_loss_enabled = False
        # The loss is one over the whole batch: `Passes` weights the micro-batches (`micro_batch_share`).
        self.current_gradient_accumulation_steps = 1
        self._logprobs: tuple[torch.Tensor, torch.Tensor] | None = None

    def get_train_dataloader(self) -> DataLoader[Any]:
        raise NotImplementedError("there is no data loader: batches are passed to `loss`")

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        return generation_batch

    def _get_per_token_logps_and_entropies(
        self, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        assert self._logprobs is not None, "call `loss`, not `compute_loss`"
        return (*self._logprobs, None)

    def loss(
        self,
        inputs: dict[str, torch.Tensor],
        logprobs_SK: torch.Tensor,
        entropies_SK: torch.Tensor,
        bonus_share: float = 1.0,
    ) -> torch.Tensor:
        """Return TRL's loss of a batch from logprobs in nats and entropies that are computed already.

        `bonus_share` scales the entropy bonus: TRL takes it as the mean over the tokens of one pass."""
        self._logprobs = (logprobs_SK, entropies_SK)
        self.entropy_coef = self.args.entropy_coef * bonus_share
        try:
            loss: torch.Tensor = self.compute_loss(self.model, inputs)
        finally:
            self._logprobs = None
        return loss

    def take_metrics(self) -> dict[str, list[float]]:
        """Return and clear TRL's own metrics: one value per pass since the last call."""
        out = {k: [float(v) for v in values] for k, values in self._metrics["train"].items()}
        self._metrics["train"].clear()
        return out


def averages(parts: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """Return the mean of each of TRL's metrics over all passes, without metrics that have no finite value."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, per_pass in part.items():
            values.setdefault(name, []).extend(per_pass)
    return {k: float(np.nanmean(v)) for k, v in values.items() if np.isfinite(v).any()}


def _no_reward(prompts: Sequence[Any], **_: Any) -> list[None]:
    raise NotImplementedError("there is no reward function: rewards come with the scored groups")


def importance_ratio(
    logprobs_SK: torch.Tensor,
    sampled_SK: torch.Tensor,
    mask_SK: torch.Tensor,
    mode: str,
    maximum: float,
    minimum: float | None = None,
) -> torch.Tensor:
    """Return importance weights, [S, K], or [S, 1] per sequence: trainer over sampler probability.

    `mode` is `trainer.loss.importance_sampling`. Weights outside of `minimum` … `maximum` are clamped to the bound
    (`…_truncate`) or set to 0 (`…_mask`). A token whose sampler logprob is NaN counts as ratio 1."""
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
    """Return the inputs of TRL's loss. They hold only the trained tokens; the context is in the logprobs already.

    With `importance_sampling = "none"` PPO's clipped ratio compares with the recorded logprobs. Otherwise it compares
    with the policy before the step's first update (`Example.old_logprobs`), and the importance weight is that policy's
    ratio to the sampler, so both are the same in every update of the step. In a step of one update the old policy is
    the current one, and the clipped ratio is 1."""
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
        "advantages": _advantages(examples, old_SK, config),
        "num_items_in_batch": torch.tensor(float(items_in_batch), device=device),
    }
    if config.loss.importance_sampling == "none":
        # A token without a recorded logprob is compared with the old policy.
        inputs["old_per_token_logps"] = torch.where(sampled.isnan(), old_SK, sampled)
    else:
        bounds = config.loss.importance_clip, config.loss.importance_clip_min
        ratio = importance_ratio(old_SK, sampled, mask, config.loss.importance_sampling, *bounds)
        if any(e.late for e in examples):
            of_sequences_S1 = importance_ratio(old_SK, sampled, mask, "sequence_truncate", *bounds)
            late_S1 = torch.tensor([[e.late] for e in examples], device=device)
            ratio = torch.where(late_S1, of_sequences_S1, ratio)
        inputs["importance_sampling_ratio"] = ratio
        if several_updates:
            inputs["old_per_token_logps"] = old_SK
    if config.loss.off_policy_mask is not None:
        inputs["sampling_per_token_logps"] = sampled
    if reference_SK is not None:
        inputs["ref_per_token_logps"] = reference_SK
    return inputs


def supervised_loss(inputs: dict[str, torch.Tensor], logprobs_SK: torch.Tensor) -> torch.Tensor:
    """Return this pass's share of the mean negative logprob of the batch's trained tokens, weighted with the rewards
    in `advantages`; in nats."""
    weighted_SK = inputs["advantages"][:, None] * logprobs_SK * inputs["completion_mask"]
    return -weighted_SK.sum() / inputs["num_items_in_batch"]


def distillation_loss(
    examples: Sequence[Example],
    divergences_SK: torch.Tensor,
    inputs: dict[str, torch.Tensor],
    config: TrainerConfig,
) -> torch.Tensor:
    """Return this pass's share of the mean divergence from the teacher over the batch's trained tokens, in nats, with
    the importance weights of the rewards' loss and `trainer.distill.weight`."""
    weights_S = torch.tensor([e.weight for e in examples]).to(divergences_SK)
    weighted_SK = weights_S[:, None] * divergences_SK * inputs["completion_mask"]
    if "importance_sampling_ratio" in inputs:
        weighted_SK = weighted_SK * inputs["importance_sampling_ratio"]
    return config.distill.weight * weighted_SK.sum() / inputs["num_items_in_batch"]


def _advantages(examples: Sequence[Example], old_SK: torch.Tensor, config: TrainerConfig) -> torch.Tensor:
    """Return the weighted advantages: of each sequence, [S], or of each token, [S, K], with rewards of calls,
    a KL penalty or a teacher.

    `old_SK`: logprobs of the policy before the step."""
    dtype = torch.promote_types(old_SK.dtype, torch.float32)
    weighted = torch.tensor([e.advantage * e.weight for e in examples], dtype=dtype, device=old_SK.device)
    teaches = config.distill.divergence == "sampled" and any(e.teaching for e in examples)
    of_calls = any(e.call_advantages is not None for e in examples)
    if examples[0].kl_penalty is None and not teaches and not of_calls:
        return weighted
    advantages_SK = weighted[:, None].repeat(1, old_SK.shape[1])
    for row, example in enumerate(examples):
        if example.call_advantages is not None:
            calls = torch.from_numpy(example.call_advantages * example.weight).to(advantages_SK)
            advantages_SK[row, : len(calls)] = calls
        if example.kl_penalty is not None:
            penalty = torch.from_numpy(example.kl_penalty * example.weight).to(advantages_SK)
            advantages_SK[row, : len(penalty)] += penalty
        if teaches and example.teaching is not None:
            teacher = torch.from_numpy(example.teaching.logprobs_k).to(advantages_SK)
            gap = torch.nan_to_num(teacher - old_SK[row, : len(teacher)], nan=0.0)
            advantages_SK[row, : len(teacher)] += config.distill.weight * example.weight * gap
    return advantages_SK


def micro_batch_share(
    loss_type: str, sequences: int, all_sequences: int, tokens: int, all_tokens: int
) -> float:
    """Return the weight of a micro-batch's loss, such that the weighted losses add up to the loss of the whole batch.

    Takes the number of sequences and trained tokens in the micro-batch and in the batch."""
    if loss_type in ("dapo", "cispo", "vespo", "sft"):
        return 1.0  # TRL and `supervised_loss` divide these by the token count of the whole batch already
    if loss_type == "bnpo":
        return tokens / max(all_tokens, 1)
    return sequences / all_sequences
