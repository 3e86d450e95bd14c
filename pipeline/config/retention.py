"""`[retention]`: how long trained versions are kept."""

from __future__ import annotations

from pipeline.config.types import Natural, NotNegative, Positive, Section


class RetentionConfig(Section, frozen=True, kw_only=True):
    """How long trained versions are kept. The trainer of a branch removes its own versions, and none that is in use."""

    adapters: Natural = 20
    """Newest adapters of each model and branch that stay in the object store. 0: all. These stay too: the best
    version by validation, the promoted version and its predecessor (the target of a rollback), versions of a
    split, versions that an open trajectory is pinned to, and versions that an inference server holds."""
    grace_s: NotNegative = 600.0
    """Time from `policy.retired` to the removal of the adapter. If something needs the version meanwhile, it stays."""
    every_s: Positive = 60.0
    """Time between two checks for versions to remove."""
    policy_days: NotNegative = 90.0
    """Age in days at which events of POLICY are deleted, except checkpoints with an adapter and each model's last
    decision. 0: never."""
