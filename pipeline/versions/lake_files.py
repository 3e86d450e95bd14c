"""Where the lake keeps versions for forks, and how object storage is opened. The store writes them, the trainer reads.

<lake>/checkpoints/<project>/<branch>/<model>/step-00000012/
    adapter.tar        the adapter, as in the object store of the log
    state.pt           the training state, if the store kept it
    event.msgpack      the event `policy.checkpoint`; written last
"""

from __future__ import annotations

from typing import Any

from pyarrow import fs

from pipeline.config import StoreConfig
from pipeline.names import subject_token

CHECKPOINTS = "checkpoints"
ADAPTER, EVENT = "adapter.tar", "event.msgpack"
S3 = "s3://"
REQUEST_S = 30.0
"""Time after which an unanswered request to object storage is repeated."""


def checkpoint_folder(project: str, branch: str, model: str, step: int) -> str:
    """Return the folder of a version below the lake."""
    names = (subject_token(name).replace("/", "%2F") for name in (project, branch, model))
    return "/".join((CHECKPOINTS, *names, f"step-{step:08d}"))


def open_s3(store: StoreConfig) -> fs.S3FileSystem:
    """Return the object storage of `store.s3_endpoint` and `store.s3_region`, with the credentials of AWS_*
    variables."""
    settings: dict[str, Any] = {
        # Arrow's default: `create_dir` makes folders without asking whether they exist.
        "check_directory_existence_before_creation": False,
        # pyarrow's documentation says that Linux ignores it; measured, Linux does not.
        "request_timeout": REQUEST_S,
    }
    if store.s3_endpoint:
        settings |= {"endpoint_override": store.s3_endpoint, "scheme": store.s3_endpoint.partition("://")[0]}
    if store.s3_region:
        settings["region"] = store.s3_region
    return fs.S3FileSystem(**settings)
