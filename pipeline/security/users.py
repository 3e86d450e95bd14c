"""The table of NATS users and their rights. The server's configuration, `journeywork docs` and tests use it.

The server that `journeywork up` starts has these users. Each authenticates with an nkey whose seed is in
`<run_dir>/keys/<user>.nk`, mode 0600. The block `authorization` of `<run_dir>/nats/nats.conf` has the NATS subjects of
each user; copy it for a server of your own.

Rights are derived from the events that a service publishes, the consumers that it uses and the streams that it reads,
so a new event or consumer needs one entry in the table. The server refuses everything else. In addition, each user
subscribes to its own inbox (`_INBOX_<user>.>`), may ask for the names of the streams, and publishes dead letters in its
own name. A user that may write to a bucket can also empty it. A user that provisions can lower the limits of a stream;
a shorter age or smaller size deletes the events beyond it. The right to publish a checkpoint does not suffice to have
it served: gateways check the trainer's signature (docs/decisions/security.md).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline import streams
from pipeline.errors import ConfigError
from pipeline.security import nkey

OPERATOR = "operator"
READER = "reader"
"""Name in a dead letter that was published by a read without a consumer."""
EVENT_STREAMS = tuple(s.name for s in streams.STREAMS)


@dataclass(frozen=True)
class User:
    """A NATS user and what it may do; nothing else is allowed."""

    name: str
    purpose: str
    publishes: tuple[str, ...] = ()
    """Subjects that it publishes events to. It may also store their oversized payloads."""
    consumes: tuple[str, ...] = ()
    """Durable consumers of `pipeline.streams` that it uses, by name."""
    follows: tuple[str, ...] = ()
    """Streams that it follows through ephemeral consumers, without acknowledgements."""
    branches: tuple[str, ...] = ()
    """Streams on which it creates durable consumers. It cannot reach those of `pipeline.streams`."""
    reads: tuple[str, ...] = ()
    """Streams that it may read without a consumer, including the oversized payloads of their events."""
    fetches: tuple[str, ...] = ()
    """Buckets whose objects it may read."""
    inspects: tuple[str, ...] = ()
    """Buckets whose size it may ask for."""
    stores: tuple[str, ...] = ()
    """Buckets that it may also write to, which includes replacing and removing objects."""
    keeps: tuple[str, ...] = ()
    """Keys of the bucket `FLEET` that it writes, with wildcards. It may then follow the whole bucket."""
    trims: tuple[str, ...] = ()
    """Streams from which it may delete single messages, for retention or an erasure."""
    awaits: tuple[str, ...] = ()
    """Durable consumers whose lag it may ask for."""
    probes: tuple[str, ...] = ()
    """Streams to which it publishes probes, to find out whether they take messages (`pipeline.log.health`)."""
    detects: bool = False
    """Whether it writes, reads and deletes the detected runs that wait for their next call."""
    sets_timers: bool = False
    """Whether it may set and cancel timers of groups."""
    purges: tuple[str, ...] = ()
    """Streams whose oldest events it may delete; NATS has no right to do only that, so it may delete all of them."""
    provisions: bool = False
    """Whether it may create and update streams, consumers and buckets, and delete dead letters."""
    connections: tuple[str, ...] = ()
    """Names of connections that are this user's, besides its own."""


USERS: tuple[User, ...] = (
    User(
        "gateway",
        "answers calls, records trajectories",
        publishes=("rollout.>", "policy.promoted.>", "policy.evaluated.>", "group.admitted.>"),
        follows=("ROLLOUTS", "POLICY", "GROUPS"),
        reads=("ROLLOUTS", "POLICY", "GROUPS"),
        keeps=("gateway.>",),
        detects=True,
        probes=("ROLLOUTS",),
    ),
    User(
        "sampler",
        "loads adapters into inference servers",
        publishes=("policy.loaded.>", "policy.unloaded.>"),
        follows=("POLICY",),
        reads=("POLICY",),
        fetches=(streams.ADAPTERS_BUCKET,),
        keeps=("sampler.>",),
    ),
    User(
        "judge",
        "scores groups",
        publishes=(
            "group.>",
            "rollout.timeout.>",
            "rollout.overdue.>",
            "rollout.teacher.>",
            "rollout.compared.>",
            "rollout.signal.>",
        ),
        consumes=("judge", "judge-timers", "judge-shadows"),
        sets_timers=True,
        reads=("ROLLOUTS", "GROUPS", "POLICY"),
    ),
    User(
        "trainer",
        "takes optimizer steps on the main branch",
        # Five tokens only: the checkpoints of a branch have the branch as a sixth.
        publishes=("policy.checkpoint.*.*.*", "policy.retired.>", "group.discarded.>"),
        trims=("POLICY",),
        consumes=("trainer",),
        keeps=("trainer.>",),
        reads=("ROLLOUTS", "GROUPS", "POLICY"),
        stores=(streams.ADAPTERS_BUCKET,),
    ),
    User(
        "experiment",
        "trains another branch",
        publishes=("policy.checkpoint.*.*.*.*", "policy.retired.>", "group.discarded.>", "dead.GROUPS.*"),
        branches=("GROUPS",),
        keeps=("experiment.>",),
        reads=("ROLLOUTS", "GROUPS", "POLICY"),
        stores=(streams.ADAPTERS_BUCKET,),
    ),
    User(
        "store",
        "writes every event to Parquet, raises alarms",
        publishes=("policy.alarm.>",),
        follows=("POLICY",),
        inspects=(streams.ADAPTERS_BUCKET,),
        fetches=(streams.ADAPTERS_BUCKET,),
        consumes=tuple(c.name for c in streams.CONSUMERS if c.name.startswith("store-")),
        reads=EVENT_STREAMS,
    ),
    User(
        "telemetry",
        "exports spans of events",
        consumes=tuple(c.name for c in streams.CONSUMERS if c.name.startswith("telemetry-")),
        reads=("ROLLOUTS", "GROUPS"),
    ),
    User(
        "erase",
        "`journeywork erase`: deletes the events of single runs",
        publishes=("policy.erased.>", "group.discarded.>"),
        reads=EVENT_STREAMS,
        trims=(*EVENT_STREAMS, *(streams.bucket_stream(streams.claims_bucket(s)) for s in EVENT_STREAMS)),
        awaits=tuple(c.name for c in streams.CONSUMERS if c.name.startswith("store-")),
    ),
    User(
        OPERATOR,
        "the supervisor and the `journeywork` commands: provisioning, status, dead letters, replay, rejudge",
        publishes=("rollout.>", "group.>", "policy.>", "dead.>"),
        reads=EVENT_STREAMS,
        fetches=(streams.ADAPTERS_BUCKET,),
        probes=EVENT_STREAMS,
        provisions=True,
        connections=("dead", "export", "provision", "rejudge", "replay", "status", "supervisor", "what-if"),
    ),
    User(
        "memory",
        "`journeywork up`: deletes the oldest events where `nats.max_memory` asks for it",
        reads=tuple(streams.MEMORY_SHARES),
        purges=tuple(streams.MEMORY_SHARES),
        awaits=tuple(c.name for c in streams.CONSUMERS if c.stream in streams.MEMORY_SHARES and c.start == "all"),
    ),
)


@dataclass(frozen=True)
class Rights:
    """The permissions of a user, as NATS subjects. `deny` takes precedence over `publish`."""

    publish: tuple[str, ...]
    deny: tuple[str, ...]
    subscribe: tuple[str, ...]


def user(name: str) -> User:
    """Return the user of a connection. Raises `ConfigError` for a name that no user has."""
    for each in USERS:
        if name == each.name or name in each.connections:
            return each
    known = ", ".join(sorted(n for u in USERS for n in (u.name, *u.connections)))
    raise ConfigError(f"{name!r} is no user of the log: name the connection after one of {known}")


def inbox_prefix(name: str) -> str:
    """Return the prefix of a user's inboxes. Each user has its own, so no user can read the replies to another."""
    return f"_INBOX_{name}"


def rights(user: User) -> Rights:
    """Return the NATS permissions of a user, derived from its row in `USERS`.

    A read, a fetch or an acknowledgement is a publish to a subject of the JetStream API (`$JS.API…`, `$JS.ACK…`), so
    nearly all rights are publish permissions. A user may subscribe to its own inbox only."""
    api = "$JS.API."
    # Each part below stands for a field of `User`; its docstring there says what the right is for.
    publish = [*user.publishes, *(streams.alive_subject(s) for s in user.probes), f"{api}STREAM.NAMES"]
    deny: list[str] = []
    consumed = [streams.consumer(name) for name in user.consumes]
    if user.sets_timers:
        publish.append(f"{streams.TIMER_SET}.>")
    if not user.provisions:
        # It publishes dead letters in its own name, and checks first whether the letter exists.
        for name in sorted({user.name, READER, *user.consumes}):
            publish += [f"dead.*.{name}", f"dead.*.{name}.*"]
    read, fetched, stored = _streams_and_buckets(user)
    publish += [f"{api}STREAM.MSG.DELETE.{stream}" for stream in user.trims]
    publish += [f"{api}STREAM.PURGE.{stream}" for stream in user.purges]
    for bucket in sorted(stored):
        publish += [f"$O.{bucket}.>", f"{api}STREAM.PURGE.OBJ_{bucket}"]
    if user.detects:
        publish += [*streams.DETECTED.subjects, f"{api}STREAM.MSG.DELETE.{streams.DETECTED.name}"]
        read.add(streams.DETECTED.name)
    for stream in sorted(read | {f"OBJ_{b}" for b in fetched | stored}):
        publish += [
            f"{api}STREAM.INFO.{stream}",
            f"{api}STREAM.MSG.GET.{stream}",
            f"{api}DIRECT.GET.{stream}",
            f"{api}DIRECT.GET.{stream}.>",
        ]
    publish += [f"{api}STREAM.INFO.{streams.bucket_stream(bucket)}" for bucket in user.inspects]
    publish += [f"{api}CONSUMER.INFO.{c.stream}.{c.name}" for c in map(streams.consumer, user.awaits)]
    for spec in consumed:
        consumer = f"{spec.stream}.{spec.name}"
        publish += [f"{api}CONSUMER.INFO.{consumer}", f"{api}CONSUMER.MSG.NEXT.{consumer}", f"$JS.ACK.{consumer}.>"]
    counted = [streams.deaths_key(name) for name in (*user.consumes, *("*" for _ in user.branches))]
    if counted:  # how often a message ended the process that handled it (`pipeline.log.deaths`)
        publish += [streams.key_subject(streams.FLEET.name, f"{key}.>") for key in counted]
        publish.append(f"{api}STREAM.MSG.GET.{streams.key_value_stream(streams.FLEET.name)}")
    followed = list(user.follows)
    if user.keeps:
        bucket = streams.key_value_stream(streams.FLEET.name)
        publish += [streams.key_subject(streams.FLEET.name, keys) for keys in user.keeps]
        publish += [f"{api}STREAM.INFO.{bucket}", f"{api}STREAM.MSG.GET.{bucket}"]
        followed.append(bucket)
    for stream in (*followed, *user.branches):
        allowed, denied = _rights_to_make_consumers(stream, consumed, durable=stream in user.branches)
        publish += allowed
        deny += denied
    if user.provisions:
        publish += [f"{api}STREAM.{verb}.*" for verb in ("CREATE", "UPDATE", "INFO")]
        publish += [f"{api}CONSUMER.{verb}.*.>" for verb in ("CREATE", "DURABLE.CREATE", "INFO")]
        publish.append(f"{api}STREAM.MSG.DELETE.DEAD")
    return Rights(tuple(publish), tuple(deny), (f"{inbox_prefix(user.name)}.>",))


def _streams_and_buckets(user: User) -> tuple[set[str], set[str], set[str]]:
    """Return the streams that a user reads, and the buckets whose objects it reads and writes."""
    read = {*user.reads, *(streams.consumer(name).stream for name in user.consumes)} & {*EVENT_STREAMS}
    written = {streams.stream_of_subject(subject) for subject in user.publishes}
    if not user.provisions:  # its dead letters
        read.add("DEAD")
        written.add("DEAD")
    stored = {*user.stores, *map(streams.claims_bucket, written)}
    return read, {*user.fetches, *user.stores, *map(streams.claims_bucket, read)}, stored


def _rights_to_make_consumers(
    stream: str, own: Sequence[streams.ConsumerSpec], *, durable: bool
) -> tuple[list[str], list[str]]:
    """Return what a user must be allowed, and denied, that makes consumers of a stream, ephemeral or `durable`: those
    of `pipeline.streams` that are not its `own` stay out of its reach."""
    verbs = ["CONSUMER.CREATE", "CONSUMER.INFO", "CONSUMER.MSG.NEXT", *(["CONSUMER.DURABLE.CREATE"] if durable else [])]
    allowed = [f"$JS.API.{verb}.{stream}.*" for verb in verbs] + ([f"$JS.ACK.{stream}.*.>"] if durable else [])
    denied: list[str] = []
    for spec in streams.CONSUMERS:
        if spec.stream == stream and spec not in own:
            denied += [f"$JS.API.{verb}.{stream}.{spec.name}" for verb in verbs]
            denied += [f"$JS.ACK.{stream}.{spec.name}.>"] if durable else []
    return allowed, denied


def seed_file(folder: Path, name: str) -> Path:
    """Return the path of a user's seed."""
    return folder / f"{name}.nk"


def authorization(folder: Path) -> str:
    """Return the `authorization` block of a NATS server's configuration, which contains public keys only. A seed that
    is missing in `folder` is created."""
    blocks = []
    for each in USERS:
        allowed = rights(each)
        publish = json.dumps({"allow": allowed.publish, "deny": allowed.deny})
        subscribe = json.dumps({"allow": allowed.subscribe})
        key = nkey.load_or_make(seed_file(folder, each.name)).public
        blocks.append(
            f"    {{ nkey: {key}, permissions: {{ publish: {publish},\n"
            f"      subscribe: {subscribe} }} }} # {each.name}\n"
        )
    return f"authorization {{\n  timeout: 10\n  users = [\n{''.join(blocks)}  ]\n}}\n"
