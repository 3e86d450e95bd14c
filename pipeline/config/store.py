"""`[store]`: events to Parquet."""

from __future__ import annotations

from pipeline.config.types import Count, NotNegative, Positive, Section, Several


class StoreConfig(Section, frozen=True, kw_only=True):
    """Events to Parquet."""

    dir: str = "store"
    """Folder under the run directory, or object storage as `s3://<bucket>/<prefix>` (the bucket has to be there)."""
    s3_endpoint: str = ""
    """URL of an S3-compatible server; empty: AWS. Credentials come from the AWS_* variables, never from here."""
    s3_region: str = ""
    """Empty: what AWS_REGION, AWS_DEFAULT_REGION or the credentials' file says."""
    flush_rows: Count = 20_000
    flush_bytes: Count = 64 * 1024 * 1024
    flush_s: Positive = 2.0
    """A file is written after so many events, bytes of events or seconds, whichever comes first; what is in memory at once
    is at most twice that."""
    compact_s: Positive = 30.0
    """Between two looks for small files to merge."""
    compact_files: Several = 16
    """So many small neighbours are worth merging."""
    compact_bytes: Count = 128 * 1024 * 1024
    """Files are merged up to about this size."""
    compact_grace_s: NotNegative = 300.0
    """How long replaced files stay for readers that listed them before; longer than any query takes."""
    keep_days: NotNegative = 0.0
    """Files whose newest event is older are let go; 0: everything is kept."""
