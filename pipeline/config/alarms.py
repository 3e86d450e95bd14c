"""`[alarms]`: when alarms are raised.

An *alarm* is a SQL query over the history (`store.alarms`) that returns a row for each thing that is wrong. The
settings here are the thresholds of these queries; each field names the alarm that uses it."""

from __future__ import annotations

from pipeline.config.types import Natural, Positive, Section, Several, Share


class AlarmsConfig(Section, frozen=True, kw_only=True):
    """When alarms are raised. `journeywork docs` writes the query of each and what to do."""

    every_s: Positive = 15.0
    """Time between two checks, which the store service makes. The pause is longer if a check takes more than a
    twentieth of this time."""
    steps: Several = 10
    """Number of a model's newest steps that `not_learning`, `kl_rise` and `sampler_mismatch` examine."""
    groups: Several = 50
    """Number of a model's newest training groups that `not_learning` examines."""
    window_s: Positive = 3600.0
    """How many seconds back `not_learning` (for groups without rewards) and `dead_letters` look, and `sampler_mismatch`
    for refused steps."""
    kl: Positive = 4.0
    """`kl_rise`: rise of the KL divergence from the base model, from the first steps to the newest, in nats per token.
    A model of 0.9 million parameters reaches 2. Lower it for a large model, which rarely exceeds 0.1."""
    logprob_diff: Positive = 0.05
    """`sampler_mismatch`: largest mean difference of the sampler's and the trainer's logprobs in the newest steps, in
    nats. The trainer itself refuses steps above `trainer.logprob_bound`."""
    judge_failed_share: Share = 0.5
    """`judge_failing`: share of the judge's passes of the last ten minutes that gave no scores."""
    not_learning: Share = 0.9
    """`not_learning`: share of what could be learned that is lost. That is the share of the newest groups whose rewards
    are equal, or that are too old; the share of the entropy that is gone; 1 less five times the most that the policy
    can have gained, as a share of the range of rewards, by the change of its KL divergence from the base (the
    inequality of Pinsker); or 1 less what it can have gained by the training reward of its steps, as a share of the
    best run's reward."""
    damaged_files: Natural = 0
    """`file_damaged`: files of the store that can't be read."""
    dead_letters: Natural = 0
    """`dead_letters`: dead letters of one consumer."""
    full_share: Share = 0.8
    """`log_full`: share of the byte limit of a stream or bucket. The limit for the disk is halfway between this share
    and 1: 0.9 by default."""
    behind_s: Positive = 120.0
    """`replica_behind`: seconds that an inference server may take to load a new version."""
    unwritten_share: Share = 0.5
    """`store_behind`: share of its stream's age limit (`nats.rollouts_max_age_h`) that an event may wait for the
    store."""
