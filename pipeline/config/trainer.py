"""`[trainer]`: scored groups to checkpoints.

The *trainer* is the service that makes a training step of the groups that the judge has scored: it changes an adapter
(LoRA) of the base model, and publishes it as a *checkpoint*, the next version of the policy. The sections are about the
loss, the optimizer, the adapter, memory, and learning from a teacher."""

from __future__ import annotations

from typing import Literal

from pipeline.config.types import (
    Coefficient,
    Count,
    Decay,
    Natural,
    NotNegative,
    Positive,
    Scale,
    Section,
    Share,
    SmallCount,
    Weight,
)


class LoraConfig(Section, frozen=True, kw_only=True):
    """The LoRA adapter that is trained."""

    rank: SmallCount = 8
    """Rank of the adapter's matrices, at most `vllm.max_lora_rank`."""
    alpha: Scale = 16.0
    """Scale of the adapter; its output is multiplied by `alpha / rank`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type in which adapters are published. `auto`: bfloat16 if the base model's weights are (`trainer.dtype`),
    else float32. With bfloat16 the passes of a step use the rounded weights that the inference server has; the
    optimizer updates float32 weights, which stay in the checkpoint folder. Use `float32` if the inference server
    computes in float32."""
    targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, by the ends of their names (`q_proj`). Empty: all except heads; in a
    mixture of experts those of the attention."""


LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
"""The losses of `trainer.engine.loss`, by TRL's names."""


class LossConfig(Section, frozen=True, kw_only=True):
    """The loss of a step; docs/training.md explains the terms."""

    type: LossType | Literal["sft"] = "dapo"
    """Name of the loss, as TRL has it. `sft`: supervised fine-tuning, the mean negative logprob of the trained tokens,
    weighted with the trajectory's reward, also for tokens that the policy did not sample; of this table, only
    `weighting` then has an effect."""
    beta: Coefficient = 0.0
    """Weight of the KL divergence from the base model. 0: the divergence is reported and not trained on."""
    importance_sampling: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "token_truncate"
    )
    """How replies sampled by an older version are corrected. The importance ratio compares the trainer's logprobs
    with the recorded ones, per token or per sequence. `..._truncate` limits the ratio to `importance_clip`;
    `..._mask` drops what exceeds it. `none`: no ratio; the recorded logprobs are the old policy of the PPO clip."""
    importance_clip: Scale = 3.0
    """Largest importance ratio."""
    importance_level: Literal["token", "sequence"] = "token"
    """Whether the ratio in the PPO clip is taken per token, or per sequence (GSPO)."""
    epsilon: Coefficient = 0.2
    """Range of the PPO clip: the probability ratio is limited to 1 ± `epsilon`. In a step of one update it has an
    effect only with `importance_sampling = "none"`, and so does `epsilon_high`: with the other corrections that ratio
    compares the trainer with itself and is always 1, and the metric `clip_ratio` is 0. In a step of several updates
    (`trainer.optimizer.epochs`, `minibatches`) it has an effect with every correction."""
    epsilon_high: Coefficient | None = None
    """Upper range of the PPO clip, where it differs from `epsilon`. With type `cispo` it is the limit of the ratio
    itself; not set, that limit is 5."""
    entropy_coef: Weight = 0.0
    """Weight of an entropy bonus: the batch's mean entropy per trained token, in nats."""
    baseline: Literal["group", "task", "batch"] = "group"
    """What is subtracted from a reward. `group`: the mean of its group. `task`: the mean of the earlier runs of its
    task and of the other runs of its group; for a run without a task, the earlier runs of its API key. `batch`: the
    mean of the step's batch, as in REINFORCE++. With `task` and `batch`, runs without a group train, too
    (`judge.min_size` = 1), and so do groups with equal rewards; `advantage_scaling` must be `batch` or `none`."""
    turn_discount: Share = 1.0
    """For rewards of single calls: the factor by which a reward counts less with each call before it. 1: a call is
    credited with all later rewards in full. The advantage of a call's tokens is its return (docs/training.md) minus the
    mean return at the same position of the runs that it is compared with."""
    advantage_scaling: Literal["group", "batch", "none"] = "group"
    """Standard deviation that advantages are divided by: that of the group's rewards, that of the batch's, or none."""
    advantage_normalization: Literal["none", "mean_abs"] = "none"
    """`mean_abs`: divide all advantages of a step by the mean of their absolute values, weighted as the loss weights
    them, so that steps are equally large whatever the rewards' scale is. ART does so."""
    kl_penalty: Coefficient = 0.0
    """Tokens on which the policy differs from the base model get a smaller advantage: each token's advantage grows by
    `kl_penalty` times (the batch's mean log ratio to the base model minus the token's own). Unlike `beta`, it adds no
    term to the loss. It costs two further forward passes of each step."""
    weighting: Literal["loss", "trajectory"] = "loss"
    """`loss`: trajectories weigh as the loss type defines. `trajectory`: each trajectory has the same weight,
    however long it is."""
    mask_truncated: bool = False
    """Do not train on replies that hit the token limit."""
    max_completion_length: Count = 512
    """Constant that type `dr_grpo` divides by, in tokens."""


class DistillConfig(Section, frozen=True, kw_only=True):
    """Distillation from a teacher, beside the rewards or alone (docs/on-the-job.md)."""

    weight: Coefficient = 0.0
    """Weight of the teacher's advantage beside that of the rewards, or of the divergence in the loss. 0: no teacher."""
    teacher: Literal["policy", "average", "base", "outside"] = "policy"
    """The teacher. `policy`: the policy before the step. `average`: an average of the adapters of all steps so far.
    `base`: the base model. These three have the hint in their prompt. `outside`: the model of `[teacher]`, with the
    policy's own prompt."""
    divergence: Literal["sampled", "reverse_kl"] = "sampled"
    """`sampled`: the advantage of each token grows by `weight` times (the teacher's logprob of it minus the policy's).
    `reverse_kl`: the loss grows by `weight` times the KL divergence of the policy from the teacher, over the teacher's
    `top_k` most probable tokens and one bin for all others, averaged over the batch's trained tokens."""
    top_k: SmallCount = 20
    """Number of tokens that `reverse_kl` compares one by one. The size of the vocabulary, or more: all tokens. A
    teacher from outside returns at most its server's `--max-logprobs`, which is 20 by default."""
    hint_template: str = "\n\n[user's hint / instruction]\n{hint}"
    """Text that is appended to the call's last user message for a hint of kind `text`."""
    correction_template: str = "\n\nCorrect solution:\n\n{hint}\n\nCorrectly solve the original question."
    """The same for a hint of kind `correction`, and for the group's best run."""
    best_run_reward: Weight | None = None
    """If the group's best run has at least this reward, the teacher's prompt for the worse runs contains it. `None`:
    never."""

    @property
    def asks_outside(self) -> bool:
        """Whether the model of `[teacher]` teaches."""
        return self.weight > 0 and self.teacher == "outside"


class OptimizerConfig(Section, frozen=True, kw_only=True):
    """AdamW on the adapter. Changed values apply from the next start on."""

    learning_rate: Share | None = None
    """`None`: 32,500 over the parameters of the model without its embeddings, at least 1e-5 (from 3 billion on) and at
    most 2e-3: 3e-4 for the demo's model of 135 million parameters (docs/training.md, before the first real run)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate changes after the warm-up. `linear` and `cosine` fall to 0 at `trainer.max_steps`.
    All updates of a step have the same learning rate. A requested batch that chooses its
    learning rate is trained with that rate."""
    epochs: SmallCount = 1
    """Times that a step trains each of its groups. With more than one epoch or minibatch, a step takes several
    optimizer updates over its batch, as PPO does, and still makes one checkpoint. The logprobs before the first
    update are computed in an additional forward pass, and the PPO clip of every update compares with them; with
    `importance_sampling = "none"` it compares with the recorded logprobs."""
    minibatches: SmallCount = 1
    """Optimizer updates of one epoch. Each trains an equal share of the step's groups, drawn anew in every epoch.
    Groups are not split, so an epoch has at most as many minibatches as groups."""
    update_rates: tuple[Share, ...] = ()
    """Learning rates of a step's updates, in order, instead of `learning_rate` and `schedule`. Further updates use the
    last one. For supervised steps, whose batch sets them."""
    warmup_steps: Natural = 0
    """Steps before the full learning rate. The rate rises in equal parts: 3 steps have 1/4, 2/4 and 3/4 of it."""
    weight_decay: Share = 0.0
    """Weight decay of AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    max_grad_norm: NotNegative = 1.0
    """The gradient is scaled down to this norm if it is larger."""


class MemoryConfig(Section, frozen=True, kw_only=True):
    """How a step is divided into passes, and what they keep in memory."""

    tokens_per_batch: Count = 16_384
    """Tokens of one forward and backward pass; a step takes as many passes as it needs. If they do not
    fit into memory, the trainer halves their number and tries again."""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Keep only each layer's input for the backward pass and compute the rest again. This costs about a third more
    computation and saves most of the memory. `auto`: from the time on when memory runs out, but always on GPUs that
    share one model (`sharded`) and with Unsloth."""
    gpu_share: Share = 0.0
    """Share of the GPU's memory that the trainer's process may use. 0: no limit. `journeywork up` sets 0.45 if its
    inference server runs on the same GPU."""
    quantization: Literal["none", "fp8", "4bit"] = "none"
    """How the weights of the base model's linear layers are stored, for a model that does not fit the GPU otherwise.
    Computation is in `trainer.dtype`. `fp8`: floats of 8 bits, with a scale for each row (torchao). `4bit`: NF4 in
    blocks of 64 (bitsandbytes). The adapter is not quantised. On a GPU `journeywork up` starts vLLM with a quantised
    base model too."""
    sharded: bool = False
    """Divide the frozen base model among the trainer's processes (`trainer.processes`), for a model that one GPU does
    not hold. Otherwise each process holds all of it, which is faster. Needs engine `transformers`."""
    packing: Literal["auto", "prefix", "padded"] = "auto"
    """`prefix`: sequences of a group compute their common prefix once. `padded`: one row per sequence. `auto`:
    `prefix` where it takes less computation and the model supports it."""


class UnslothConfig(Section, frozen=True, kw_only=True):
    """How engine `unsloth` loads the base model. The other engine does not use these settings."""

    max_seq_length: Natural = 0
    """Longest sequence that Unsloth prepares for, in tokens; at most the model's own limit. Longer sequences are not
    trained. 0: the served length, `vllm.max_model_len` or else the model's own limit."""


class TrainerConfig(Section, frozen=True, kw_only=True):
    """Scored groups to checkpoints."""

    engine: Literal["transformers", "unsloth"] = "transformers"
    """Library that loads and runs the model. `unsloth` needs a CUDA GPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Type of the base model's weights. `auto`: float32 on CPU, bfloat16 on CUDA. `float64` is for comparing
    results."""
    groups_per_step: SmallCount = 8
    """Groups in one optimizer step."""
    max_steps: Natural = 0
    """The trainer stops after this step. 0: it never stops."""
    max_staleness: Natural = 2
    """Tokens that were sampled more than this many steps ago are not trained. A group without younger tokens is
    discarded."""
    late: Literal["off", "sequence_truncate"] = "off"
    """How tokens older than `max_staleness` are treated, also those of replays. `off`: they are not trained.
    `sequence_truncate`: they are trained, and a sequence with such a token is weighted with the importance ratio of the
    whole sequence, limited to `loss.importance_clip`."""
    late_min_ess: Share = 0.2
    """Smallest effective sample size of a step's late sequences, as a share of their number. Below it their old tokens
    are not trained; groups without younger ones are discarded as `stale`."""
    batch_timeout_s: Positive = 3600.0
    """A batch that an agent requested ends if none of its groups was scored or discarded for this time. Its groups that
    wait are discarded as `incomplete`."""
    processes: SmallCount = 1
    """Processes, one per GPU, that share the passes of a step. `journeywork up` starts them by torchrun.
    For several machines, start them yourself."""
    threads: SmallCount = 1
    """CPU threads of the trainer's computation. The inference server uses the other cores."""
    start_timeout_s: Positive = 600.0
    """A trainer that has not loaded its models after this time is killed and started again."""
    logprob_bound: NotNegative | None = None
    """Largest difference of logprobs, in nats, that counts as rounding. At the start, the logprobs of a training
    pass are compared with those of the model's own forward pass: the largest difference of any token in float32,
    the mean in bfloat16, where rounding may send a token to another expert. Above the bound the trainer refuses
    the model. In every step, computed logprobs are compared with the recorded ones (the mean). Above the bound
    the step is not taken. Not set: 1e-3 for float32, 0.08 for bfloat16."""
    check_share: Share = 0.03
    """Limit of the forward passes that only check: their tokens, as a share of the tokens that ten steps compute. One
    of ten steps makes them. Half of the tokens compare earlier versions with the recorded logprobs, half measure the KL
    divergence from the base model. Tokens of the current version are compared in training anyway. 0: no such passes."""
    checkpoints: str = "checkpoints"
    """Folder of checkpoints under the run directory."""
    keep_checkpoints: SmallCount = 3
    """Newest checkpoint folders that stay on disk. The log's object store keeps adapters by `[retention]`."""
    best_min_trajectories: Natural = 8
    """Validation trajectories that a step needs before it can become the best one. It replaces the best one if the
    95 % interval of the difference of their mean rewards lies above 0."""
    seed: Natural = 0
    """Seed of the adapter's initial weights, and of the order of minibatches."""
    branch: str = "main"
    """Branch of the log to train from. `journeywork replay` and `rejudge` make branches. Training on another branch
    than `main` begins at the base model; its checkpoints are its own, and served as `<model>+<branch>@<step>`."""
    batch_settings: tuple[str, ...] = ("loss", "optimizer")
    """Settings below `trainer` that a requested batch may change for its own step: single settings, or whole tables.
    Such a batch needs an operator's key."""
    lora: LoraConfig = LoraConfig()
    loss: LossConfig = LossConfig()
    distill: DistillConfig = DistillConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    memory: MemoryConfig = MemoryConfig()
    unsloth: UnslothConfig = UnslothConfig()
