"""`[trainer]`: scored groups to checkpoints."""

from __future__ import annotations

from typing import Literal

from pipeline.config.types import Count, Decay, Natural, NotNegative, Positive, Section, Share


class TrainerConfig(Section, frozen=True, kw_only=True):
    """Groups to checkpoints."""

    engine: Literal["transformers", "unsloth"] = "transformers"
    """`unsloth` needs a CUDA GPU. It is imported before the libraries that it patches."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Type of the base model's weights; `auto`: float32 on CPU, bfloat16 on CUDA. `float64` is for comparing results."""
    load_in_4bit: bool = False
    """With engine `unsloth`: hold the base model in four bits."""
    max_seq_length: Count = 8192
    """With engine `unsloth`: the longest sequence it prepares for."""
    groups_per_step: Count = 8
    learning_rate: NotNegative = 1e-5
    """Of AdamW on the adapter; for models of about 0.5 to 10 billion parameters. TRL's guide to LoRA has 1e-5 where full training
    has 1e-6. Much smaller models want more (the demo's 0.8 million parameters: 2e-3)."""
    max_steps: Natural = 0
    """0: for as long as groups come."""
    lora_rank: Count = 8
    lora_alpha: Positive = 16.0
    lora_targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, by the ends of their names (`q_proj`). Empty: all but heads, routers and experts."""
    loss_type: str = "dapo"
    beta: NotNegative = 0.0
    """Weight of the KL to the base model."""
    max_staleness: Natural = 2
    """Tokens sampled more than this many steps ago are not trained; a group with none younger is discarded."""
    sampler_correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "token_truncate"
    """What is done about replies sampled by an older version: importance ratios against the recorded logprobs, cut off
    at `correction_max` or (mask) dropped beyond it; `none` clips against the recorded logprobs as PPO does."""
    correction_max: Positive = 3.0
    correction_min: NotNegative | None = None
    """Smallest ratio: raised to it, or (mask) dropped below it."""
    epsilon: NotNegative = 0.2
    """Clip range of the probability ratio. It acts with `sampler_correction` = `none` only, as do `epsilon_high` and `delta`: under
    the other corrections the ratio that is clipped is that of the trainer to itself, always 1, and `clip_ratio` is always 0."""
    epsilon_high: NotNegative | None = None
    """Upper clip range where it differs from `epsilon`. With `loss_type` = `cispo` it is the bound of the ratio itself, 5 where it
    is left out."""
    delta: Positive | None = None
    """Two-sided clipping: bound of the ratio where the advantage is negative; above `1 + epsilon_high`."""
    off_policy_mask: NotNegative | None = None
    """Sequences with a negative advantage whose mean log ratio of sampler to trainer exceeds this are left out."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus: the batch's mean entropy per trained token, in nats."""
    kl_unbiased: bool = True
    """Multiply the KL term by the probability ratio, which makes its gradient that of the reverse KL."""
    loss_options: dict[str, float] = {}
    """Constants of single loss types by TRL's names: `sapo_temperature_pos`, `sapo_temperature_neg`, `vespo_k_pos`,
    `vespo_lambda_pos`, `vespo_k_neg`, `vespo_lambda_neg`."""
    importance_level: Literal["token", "sequence"] = "token"
    advantage_scaling: Literal["group", "batch", "none"] = "group"
    """By which standard deviation an advantage is divided."""
    weighting: Literal["loss", "trajectory"] = "loss"
    """`loss`: as the loss type says; `trajectory`: every trajectory counts the same however long it is."""
    mask_truncated: bool = False
    """Do not train replies that hit the token limit."""
    max_completion_length: Count = 512
    """The constant that loss type `dr_grpo` divides by."""
    max_grad_norm: NotNegative = 1.0
    weight_decay: NotNegative = 0.0
    adam_betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    lr_schedule: Literal["constant", "linear", "cosine", "inverse_sqrt"] = "constant"
    """`linear` and `cosine` fall to 0 at `max_steps`. `inverse_sqrt` needs no end: after `warmup_steps` (10,000 where that is 0) it
    falls with the root of the steps taken. Changed settings of the optimizer hold from the next start on."""
    warmup_steps: Natural = 0
    threads: Count = 1
    """CPU threads of the trainer's computation; the rest is the inference server's."""
    start_timeout_s: Positive = 600.0
    """A trainer that has not loaded its models by then is killed and started again."""
    tokens_per_batch: Count = 16_384
    """Token budget of one forward and backward pass; a step takes as many passes as it needs. On CUDA the trainer takes fewer where
    the memory formula says that so many do not fit (`journeyman check-model`)."""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Keep only each layer's input for the backward pass and compute the rest again: about a third more computation, a small part of
    the memory. `auto`: on with CUDA where the model can, off on CPU."""
    gpu_memory_share: Share = 0.0
    """Share of the GPU's memory that passes are planned for. 0: what is free; `journeyman up` sets 0.45 where its inference server is
    on the same GPU."""
    packing: Literal["auto", "prefix", "padded"] = "auto"
    """`prefix`: sequences of a group share the computation of what they have in common; `auto`: where it pays."""
    attention: Literal["sdpa", "flex"] = "sdpa"
    """How shared prefixes are computed: `sdpa` with a dense mask, or PyTorch's FlexAttention, whose mask takes no memory that
    grows with the square of a tree. FlexAttention has no gradients on CPU, so it needs CUDA."""
    processes: Count = 1
    """Processes (GPUs) that share the passes of a step; `journeyman up` starts them with `accelerate launch`."""
    peak_tflops: NotNegative = 0.0
    """The device's peak at the weights' type, to report model FLOPs utilisation; 0: unknown."""
    logprob_bound: NotNegative | None = None
    """Largest difference, in nats, that is put down to rounding when logprobs of the trainer are compared: at start, of a
    training pass with the model's own forward pass (the largest of any token; in bfloat16 the mean, since rounding may send a
    token to another expert), and in every step with those that the sampler recorded (the mean). Empty: 1e-3 where the model
    is float32, 0.08 in bfloat16. Above it the model is refused at start, and a step is not taken."""
    check_sequences: Natural = 8
    """Sequences per step whose recorded logprobs are compared with recomputed ones at the version that sampled."""
    keep_checkpoints: Count = 3
    """Newest checkpoint folders that stay on disk (the log's object store keeps every adapter)."""
    best_min_trajectories: Natural = 8
    """Validation trajectories that a step needs to become the best one. It takes the place of another where the 95 % interval of
    the difference of their mean rewards lies above 0."""
    seed: Natural = 0
    branch: str = "main"
    """Line of history to train from; another one than `main` is made by `journeyman replay` or `rejudge`, begins at the
    base model and has checkpoints of its own, which the gateway does not serve."""
    checkpoints: str = "checkpoints"
    """Folder under the run directory."""
