"""The one table of streams and consumers: provisioning, `journeyman status` and docs read it."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Literal

from pipeline.names import subject_token

DAY_S = 86_400.0


@dataclass(frozen=True)
class StreamSpec:
    """A stream with file storage, S2 compression and limits retention."""

    name: str
    subjects: tuple[str, ...]
    purpose: str
    max_age_s: float = 0.0
    """0: events go by the retention of `trainer.checkpoints.retention` only."""
    share: float = 0.0
    """Of `nats.max_bytes`: what the stream may take on disk."""
    discard: Literal["new", "old"] = "new"
    """At its byte limit the stream refuses new messages, or drops the oldest."""
    duplicate_window_s: float = 600.0

    @property
    def at_limit(self) -> str:
        """What happens at the byte limit, in words."""
        return "the server refuses new events" if self.discard == "new" else "the oldest events are dropped"


@dataclass(frozen=True)
class ConsumerSpec:
    """A durable pull consumer. Held messages are kept alive while their holder lives; `ack_wait_s` after it died they
    go to the next holder, and after `max_deliver` deliveries to the dead letters."""

    name: str
    stream: str
    subjects: tuple[str, ...]
    purpose: str
    ack_wait_s: float = 10.0
    max_deliver: int = 10
    max_ack_pending: int = 10_000
    start: Literal["all", "new"] = "all"


STREAMS: tuple[StreamSpec, ...] = (
    StreamSpec(
        "ROLLOUTS",
        ("rollout.>",),
        "trajectories: opened, exchanges, completed",
        max_age_s=30 * DAY_S,
        share=0.48,
    ),
    StreamSpec("GROUPS", ("group.>",), "scored and discarded groups", max_age_s=90 * DAY_S, share=0.1),
    StreamSpec("POLICY", ("policy.>",), "checkpoints, promotions, adapter loads", share=0.04),
    # A dead letter must never stop the rest: it is in Parquet too, and an alarm comes long before one is dropped.
    StreamSpec(
        "DEAD",
        ("dead.>",),
        "what no one could use, with the reason",
        max_age_s=90 * DAY_S,
        share=0.04,
        discard="old",
    ),
)
CLAIMS_SHARE = 0.25
"""Of its stream's share: the bucket of events that exceed the payload limit, in addition."""

CONSUMERS: tuple[ConsumerSpec, ...] = (
    ConsumerSpec("judge", "ROLLOUTS", ("rollout.completed.>",), "groups and scores", max_deliver=50,
                 max_ack_pending=100_000),
    ConsumerSpec("trainer", "GROUPS", ("group.scored.>",), "takes optimizer steps", max_deliver=50),
    ConsumerSpec("store-rollouts", "ROLLOUTS", ("rollout.>",), "Parquet", max_ack_pending=200_000),
    ConsumerSpec("store-groups", "GROUPS", ("group.>",), "Parquet", max_ack_pending=200_000),
    ConsumerSpec("store-policy", "POLICY", ("policy.>",), "Parquet", max_ack_pending=200_000),
    ConsumerSpec("store-dead", "DEAD", ("dead.>",), "Parquet", max_ack_pending=200_000),
    ConsumerSpec("telemetry-rollouts", "ROLLOUTS", ("rollout.>",), "spans", start="new"),
    ConsumerSpec("telemetry-groups", "GROUPS", ("group.>",), "spans", start="new"),
    ConsumerSpec("telemetry-policy", "POLICY", ("policy.>",), "spans", start="new"),
)  # fmt: skip

RETRY_HEADER = "Journeyman-Retry"
"""On a dead letter that was given back: the one consumer that may take it; the others acknowledge and pass it by."""

ADAPTERS_BUCKET = "ADAPTERS"
"""Object store bucket of trained adapters."""
CLAIM_MARGIN_S = DAY_S
"""An object is in its bucket before its message is in the stream, so it must stay that much longer."""


@dataclass(frozen=True)
class BucketSpec:
    """An object store bucket."""

    name: str
    purpose: str
    share: float = 0.0
    """Of `nats.max_bytes`."""
    max_age_s: float = 0.0
    """0: kept for ever."""


ALIVE = "alive."


def byte_limit(share: float, total: int, *, now: int | None = None, held: int = 0) -> int:
    """Bytes of a stream or bucket with that share of `nats.max_bytes`, which is `total`; -1 is JetStream's word for no limit.

    `now` and `held` are the limit and the bytes of one that exists: a `total` of 0 leaves its limit alone, and a limit below
    what it holds would make the server drop the oldest at once, read or not."""
    if not total:
        return -1 if now is None else now
    return max(int(share * total), held)


def alive_subject(stream: str) -> str:
    """Where the supervisor and the gateways write to learn whether `stream` takes messages; no consumer reads it."""
    return ALIVE + stream


def claims_bucket(stream: str) -> str:
    """Bucket of the events of `stream` that exceed the payload limit."""
    return f"CLAIMS_{stream}"


def buckets() -> tuple[BucketSpec, ...]:
    """Every bucket; a claimed object lives as long as the longest-lived message that can name it, and then goes."""
    claims = tuple(
        BucketSpec(
            claims_bucket(s.name),
            f"events of `{s.name}` that exceed the payload limit",
            CLAIMS_SHARE * s.share,
            s.max_age_s + CLAIM_MARGIN_S if s.max_age_s else 0.0,
        )
        for s in STREAMS
    )
    return (BucketSpec(ADAPTERS_BUCKET, "trained adapters, one uncompressed tar each", 0.17), *claims)


def stream_of(subject: str) -> str:
    """Return the name of the stream that holds `subject`, which may also be an event's tag. Raises `KeyError` if none does."""
    for spec in STREAMS:
        if any(subject.startswith(s.removesuffix(">")) for s in spec.subjects):
            return spec.name
    raise KeyError(f"no stream takes {subject!r}")


def bucket_stream(bucket: str) -> str:
    """Return the name of the stream that holds a bucket."""
    return f"OBJ_{bucket}"


def trainer_consumer(branch: str) -> ConsumerSpec:
    """What the trainer of a branch takes; that of `main` takes everything, and passes by what is not its own."""
    spec = consumer("trainer")
    if branch == "main":
        return spec
    token = subject_token(branch)
    subjects = (f"group.scored.*.*.*.*.{token}", f"group.scored.*.*.*.*.{token}.*")
    digest = hashlib.sha256(branch.encode()).hexdigest()[:12]  # a consumer's name takes fewer characters
    return dataclasses.replace(
        spec, name=f"trainer-{digest}", subjects=subjects, purpose=f"takes optimizer steps on branch {branch}"
    )


def stream(name: str) -> StreamSpec:
    return next(s for s in STREAMS if s.name == name)


def consumer(name: str) -> ConsumerSpec:
    """The consumer called `name`; `KeyError` names those there are."""
    for spec in CONSUMERS:
        if spec.name == name:
            return spec
    raise KeyError(f"no consumer {name!r}; there are: {', '.join(c.name for c in CONSUMERS)}")
