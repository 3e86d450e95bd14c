"""The table of streams, consumers and buckets. Provisioning, `journeywork status` and `journeywork docs` use it.

A *stream* of NATS JetStream holds messages in order; a message's *subject* says what it is about, such as
`rollout.completed.<project>.<model>.<group>.<trajectory>`. A *consumer* remembers what a service has acknowledged. A
*bucket* is a stream of NATS' own, for objects (adapters, events beyond the payload limit) or for values by key.

`journeywork up` and `journeywork provision` create the streams, and so does every service that connects to a server of
your own (`nats.provision`). They have file storage, S2 compression and limits retention. A change of the table changes
the limits of an existing stream; its events stay, except those that a shorter age deletes. No byte limit is set below a
stream's present size. At 80 % of a limit the alarm `log_full` is raised. The age of `ROLLOUTS` is
`nats.rollouts_max_age_h`; the table shows the default. Each stream of events also takes `alive.<stream>`: probes of
supervisor and gateways, which are deleted after a minute and which no consumer reads. `DETECTED` holds no events.

`TIMERS` holds no events either, and has work-queue retention. A judge sets a timer on `timer.set.>` with the headers
`Nats-Schedule` and `Nats-Schedule-Target` (NATS 2.12 or newer), and the server moves it to `timer.due.>` when it is
due. An acknowledged timer is deleted. A timer holds the event that its delivery publishes."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

from pipeline.names import subject_token

DAY_S = 86_400.0


@dataclass(frozen=True)
class StreamSpec:
    """A stream: what it holds, and its limits."""

    name: str
    subjects: tuple[str, ...]
    purpose: str
    max_age_s: float = 0.0
    """How long events are kept, in seconds; 0: until `trainer.retention` deletes them."""
    share: float = 0.0
    """Share of `nats.max_bytes` that the stream may take on disk."""
    discard: Literal["new", "old"] = "new"
    """At its byte limit the stream refuses new messages or deletes the oldest."""
    duplicate_window_s: float = 600.0
    """How long the server recognises a message id, and holds it in memory (290 B each). A publish is repeated for a
    shorter time (`nats.publish_deadline_s`)."""
    timers: bool = False
    """Whether its messages are timers: the server delivers each at its time and deletes it once it is acknowledged."""

    @property
    def at_limit(self) -> str:
        """What happens at the byte limit, for alarms and docs."""
        return "the server refuses new events" if self.discard == "new" else "the server deletes the oldest events"


@dataclass(frozen=True)
class ConsumerSpec:
    """A durable pull consumer. A process extends the acknowledgement time of the messages that it is handling. The
    server delivers the messages of a dead process to another one after `ack_wait_s`. After `max_deliver` deliveries a
    message becomes a dead letter."""

    name: str
    stream: str
    subjects: tuple[str, ...]
    purpose: str
    ack_wait_s: float = 10.0
    max_deliver: int = 10
    max_deaths: int = 2
    """How often a message may end the process that handles it before it becomes a dead letter. 0: deaths are not
    counted, and no message is handled alone, because the service finds out itself which one is at fault."""
    max_ack_pending: int = 10_000
    """Deliveries that may wait for their acknowledgement; beyond it the server delivers no more."""
    start: Literal["all", "new"] = "all"
    """Whether it begins with the stream's oldest message or with the newest one, when it is created."""


STREAMS: tuple[StreamSpec, ...] = (
    StreamSpec(
        "ROLLOUTS",
        ("rollout.>",),
        "trajectories: opened, exchanges, completed; signals, a teacher's and an apprentice's answers about them",
        max_age_s=2 * DAY_S,
        share=0.48,
        duplicate_window_s=120.0,
    ),
    StreamSpec("GROUPS", ("group.>",), "scored and discarded groups", max_age_s=90 * DAY_S, share=0.1),
    StreamSpec("POLICY", ("policy.>",), "checkpoints, promotions, adapter loads, evaluations, alarms", share=0.04),
    # Dead letters must never block other streams. They are in Parquet too, and an alarm comes long before one is
    # deleted.
    StreamSpec(
        "DEAD",
        ("dead.>",),
        "messages that no consumer could use, with the reason",
        max_age_s=90 * DAY_S,
        share=0.04,
        discard="old",
    ),
)
DETECTED_PREFIX = "detected"
DETECTED = StreamSpec(
    "DETECTED",
    (f"{DETECTED_PREFIX}.>",),
    "detected runs that wait for their next call, and what calls may quote of them",
    max_age_s=2 * DAY_S,
    share=0.005,
    discard="old",
    duplicate_window_s=120.0,
)
"""No events: no consumer reads it and no probe is written to it. Gateways write, read and delete its messages
(`rollout_gateway.capture.waiting_runs`)."""
TIMERS = StreamSpec(
    # The server keeps no timers in a stream that refuses new messages at its limit, so they have one of their own.
    "TIMERS",
    ("timer.>",),
    "deadlines of open groups",
    discard="old",
    timers=True,
)
"""Timers are no events: they end, and nothing keeps them. They have no byte limit, because a deleted timer would leave
its group open."""
TIMER_SET, TIMER_DUE = "timer.set", "timer.due"
"""Prefixes of the subjects of a timer that is set, and of one that is due."""
MEMORY_SHARES = {"ROLLOUTS": 0.8, "GROUPS": 0.2}
"""The streams whose subjects grow with the number of runs, and their shares of `nats.max_memory`."""
CLAIMS_SHARE = 0.25
"""The size of a stream's bucket of large events, as a share of the stream's own share and in addition to it."""

CONSUMERS: tuple[ConsumerSpec, ...] = (
    ConsumerSpec(
        "judge",
        "ROLLOUTS",
        ("rollout.completed.>", "rollout.signal.>"),
        "groups and scores",
        max_deliver=50,
        max_ack_pending=100_000,
    ),
    ConsumerSpec("judge-timers", "TIMERS", (f"{TIMER_DUE}.>",), "closes groups whose time is up", max_deliver=50),
    ConsumerSpec(
        "judge-shadows", "ROLLOUTS", ("rollout.shadow.>",), "compares answers of shadow calls", max_deliver=50
    ),
    ConsumerSpec("trainer", "GROUPS", ("group.scored.>",), "takes optimizer steps", max_deliver=50, max_deaths=0),
    ConsumerSpec("store-rollouts", "ROLLOUTS", ("rollout.>",), "Parquet", max_ack_pending=200_000),
    ConsumerSpec("store-groups", "GROUPS", ("group.>",), "Parquet", max_ack_pending=200_000),
    ConsumerSpec("store-policy", "POLICY", ("policy.>",), "Parquet", max_ack_pending=200_000),
    ConsumerSpec("store-dead", "DEAD", ("dead.>",), "Parquet", max_ack_pending=200_000),
    ConsumerSpec("telemetry-rollouts", "ROLLOUTS", ("rollout.>",), "spans", start="new"),
    ConsumerSpec("telemetry-groups", "GROUPS", ("group.>",), "spans", start="new"),
)

RETRY_HEADER = "Journeywork-Retry"
"""Header of a dead letter that `journeywork dead retry` publishes again: the one consumer that may use it. The others
acknowledge it unused."""

ADAPTERS_BUCKET = "ADAPTERS"
"""Object store bucket of trained adapters."""
CLAIM_MARGIN_S = 3600.0
"""An object is stored before its message, so it must be kept this much longer."""


@dataclass(frozen=True)
class BucketSpec:
    """An object store bucket."""

    name: str
    purpose: str
    share: float = 0.0
    """Share of `nats.max_bytes`."""
    max_age_s: float = 0.0
    """Maximum age of messages in seconds; 0 keeps them for ever."""


@dataclass(frozen=True)
class KeyValueSpec:
    """A key-value bucket. It holds the last value of each key, until the value's own TTL is over."""

    name: str
    keys: tuple[str, ...]
    """Keys in the bucket; parts in `<>` vary."""
    purpose: str


FLEET = KeyValueSpec(
    "FLEET",
    (
        "sampler.<project>.<replica>",
        "gateway.<project>.<gateway>",
        "trainer.<project>.<branch>",
        "experiment.<project>.<branch>",
        "deaths.<consumer>.<stream>.<sequence>-<time>",
    ),
    "the inference servers that sampler agents have registered, and the versions that each gateway uses; a record "
    "expires `sampler.ttl_s` after its last renewal. The trainer of each branch. For a day, how often a message ended "
    "the process that handled it",
)

ALIVE = "alive."
"""Prefix of the subjects of probes, which find out whether a stream takes writes (`pipeline.log.health`)."""


def byte_limit(share: float, total: int, *, present_limit: int = -1, size: int = 0) -> int:
    """Return the byte limit of a stream or bucket with a share of `nats.max_bytes`, which is `total`; -1 means no
    limit.

    `present_limit` and `size` are those of one that exists. A `total` of 0 leaves its limit as it is. The limit is
    never below `size`, because the server would delete the oldest messages at once, whether consumed or not."""
    if not total:
        return present_limit
    return max(int(share * total), size)


def alive_subject(stream: str) -> str:
    """Return the subject to which supervisor and gateways publish probes of `stream`; no consumer reads it."""
    return ALIVE + stream


def claims_bucket(stream: str) -> str:
    """Return the name of the bucket for events of `stream` that exceed the payload limit."""
    return f"CLAIMS_{stream}"


def streams_with_ages(rollouts_max_age_s: float) -> tuple[StreamSpec, ...]:
    """Return the streams of events with `nats.rollouts_max_age_h` as the age of ROLLOUTS, in seconds."""
    return tuple(dataclasses.replace(s, max_age_s=rollouts_max_age_s) if s.name == "ROLLOUTS" else s for s in STREAMS)


def buckets(specs: tuple[StreamSpec, ...] = STREAMS) -> tuple[BucketSpec, ...]:
    """Return every bucket. An object of a claim check is kept as long as a message of its stream, and a margin.
    `specs`: the streams with their ages."""
    claims = tuple(
        BucketSpec(
            claims_bucket(s.name),
            f"events of `{s.name}` that exceed the payload limit",
            CLAIMS_SHARE * s.share,
            s.max_age_s + CLAIM_MARGIN_S if s.max_age_s else 0.0,
        )
        for s in specs
    )
    return (BucketSpec(ADAPTERS_BUCKET, "trained adapters, one uncompressed tar each", 0.17), *claims)


def stream_of_subject(subject: str) -> str:
    """Return the name of the stream that holds `subject`, which may also be an event's tag. Raises `KeyError` if none
    does."""
    for spec in (*STREAMS, DETECTED, TIMERS):
        if any(subject.startswith(s.removesuffix(">")) for s in spec.subjects):
            return spec.name
    raise KeyError(f"no stream takes {subject!r}")


def bucket_stream(bucket: str) -> str:
    """Return the name of the JetStream stream in which NATS keeps the object bucket `bucket`."""
    return f"OBJ_{bucket}"


def key_value_stream(bucket: str) -> str:
    """Return the name of the JetStream stream in which NATS keeps the key-value bucket `bucket`."""
    return f"KV_{bucket}"


def key_subject(bucket: str, key: str) -> str:
    """Return the subject on which NATS keeps `key` of the key-value bucket `bucket`. With NATS wildcards (`*`, `>`) in
    `key`, it is a filter of several keys."""
    return f"$KV.{bucket}.{key}"


def deaths_key(consumer: str) -> str:
    """Return what the keys of a consumer in `FLEET` begin with. Consumers of branches, which are not in the table,
    share one NATS user and one prefix."""
    return f"deaths.{consumer}" if any(c.name == consumer for c in CONSUMERS) else f"deaths.branch.{consumer}"


def replica_name(url: str) -> str:
    """Return the name of the inference server at `url`, which is the host and port of the URL."""
    return url.partition("://")[2].rstrip("/")


def sampler_key(project: str, replica: str) -> str:
    """Return the key of a server's record. `*` as `replica` matches all."""
    return f"sampler.{_key_token(project)}.{_key_token(replica)}"


def gateway_key(project: str, gateway: str) -> str:
    """Return the key of a gateway's record. `*` as `gateway` matches all."""
    return f"gateway.{_key_token(project)}.{_key_token(gateway)}"


def _key_token(name: str) -> str:
    """Escape the characters in `name` that NATS clients refuse in a key."""
    return name if name == "*" else quote(name, safe="").replace(".", "%2E").replace("~", "%7E").replace("%", "=")


def trainer_consumer(branch: str) -> ConsumerSpec:
    """Return the consumer of the trainer of a branch. The server sends it the groups of its branch only; that of `main`
    gets those of all branches, and the trainer skips the others."""
    spec = consumer("trainer")
    if branch == "main":
        return spec
    token = subject_token(branch)
    subjects = (f"group.scored.*.*.*.*.{token}", f"group.scored.*.*.*.*.{token}.*")
    # The name of a consumer is limited in length and characters.
    digest = hashlib.sha256(branch.encode()).hexdigest()[:12]
    return dataclasses.replace(
        spec, name=f"trainer-{digest}", subjects=subjects, purpose=f"takes optimizer steps on branch {branch}"
    )


def stream(name: str) -> StreamSpec:
    """Return the stream of events, or of timers, called `name`. Raises `StopIteration` if there is none."""
    return next(s for s in (*STREAMS, TIMERS) if s.name == name)


def consumer(name: str) -> ConsumerSpec:
    """Return the consumer called `name`. Raises `KeyError`, which lists the consumers."""
    for spec in CONSUMERS:
        if spec.name == name:
            return spec
    raise KeyError(f"no consumer {name!r}; there are: {', '.join(c.name for c in CONSUMERS)}")
