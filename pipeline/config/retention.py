"""`[retention]`: how long trained versions are kept."""

from __future__ import annotations

from pipeline.config.types import Natural, NotNegative, Positive, Section


class RetentionConfig(Section, frozen=True, kw_only=True):
    """What stays of trained versions. The trainer of a branch removes what is its own; nothing that serves is removed."""

    adapters: Natural = 20
    """Newest adapters of each model and branch that stay in the object store; 0: all. The best by validation, what a name
    stands for, its predecessor (a rollback's target), what a split names, what an open trajectory is pinned to and what an
    inference server holds stay too."""
    grace_s: NotNegative = 600.0
    """From `policy.retired` to the removal of the adapter, if nothing came to need it meanwhile."""
    every_s: Positive = 60.0
    """Between two looks at what may go."""
    policy_days: NotNegative = 90.0
    """Age at which events of POLICY go, except checkpoints whose adapter is there and each model's last decision; 0: never."""
