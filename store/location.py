"""Opens the place that `store.dir` names: a folder or object storage."""

from __future__ import annotations

from pipeline.config import Config
from store.local import LocalTarget
from store.target import Target

OBJECT_STORAGE = "s3://"
"""`store.dir` begins with this where it names object storage."""


def open_target(config: Config) -> Target:
    """The target of a run's settings. Raises `ConfigError` where `store.dir` names no bucket."""
    if config.store.dir.startswith(OBJECT_STORAGE):
        from store.objects import ObjectTarget  # fsspec and S3 take a while to import

        return ObjectTarget(config)
    return LocalTarget(config.path(config.store.dir))
