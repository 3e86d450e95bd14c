"""`[store]`: events to Parquet."""

from __future__ import annotations

from pipeline.config.types import Count, NotNegative, Positive, Section, Several


class StoreConfig(Section, frozen=True, kw_only=True):
    """Events to Parquet."""

    dir: str = "store"
    """Folder under the run directory, or object storage as `s3://<bucket>/<prefix>` (the bucket must exist)."""
    s3_endpoint: str = ""
    """URL of an S3-compatible server. Empty: AWS. Credentials come from the AWS_* environment variables only."""
    s3_region: str = ""
    """Region of the bucket. Empty: from AWS_REGION, AWS_DEFAULT_REGION or the AWS configuration file."""
    flush_rows: Count = 20_000
    """A file is written when this many events wait, or `flush_bytes` or `flush_s` is reached."""
    flush_bytes: Count = 64 * 1024 * 1024
    """Bytes of events that wait at most. Memory holds at most twice as many."""
    flush_s: Positive = 2.0
    """Longest time that an event waits to be written."""
    compact_s: Positive = 30.0
    """Time between two checks for small files to merge."""
    compact_files: Several = 16
    """Number of small neighbouring files that are merged into one."""
    compact_bytes: Count = 128 * 1024 * 1024
    """Approximate size up to which files are merged, in bytes."""
    compact_grace_s: NotNegative = 300.0
    """How long merged files stay for queries that began before the merge. Make it longer than any query."""
    keep_days: NotNegative = 0.0
    """Age in days of its newest event at which a file is deleted. 0: never."""
