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
    """Buckets whose objects, and whose size, it may read."""
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
        connections=("dead", "provision", "rejudge", "replay", "status", "supervisor", "what-if"),
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


_API = "$JS.API."
"""What the subjects of JetStream's API begin with. A read and a fetch are publishes to such a subject, and an
acknowledgement is one to `$JS.ACK…`, so nearly all rights are permissions to publish."""


def rights(user: User) -> Rights:
    """Return the NATS permissions of a user, by its row in `USERS`. It may subscribe to its own inbox only."""
    allowed, denied = _rights_to_make_consumers(user)
    publish = (
        *_rights_to_write(user),
        *_rights_to_read(user),
        *_rights_to_consume(user),
        *_rights_to_fleet(user),
        *allowed,
        *(_rights_to_provision() if user.provisions else ()),
    )
    return Rights(publish, denied, (f"{inbox_prefix(user.name)}.>",))


def _rights_to_write(user: User) -> list[str]:
    """Return the subjects to which a user may publish in order to write events, probes, timers and objects, and to
    delete messages."""
    publish = [*user.publishes, *map(streams.alive_subject, user.probes)]
    if user.sets_timers:
        publish.append(f"{streams.TIMER_SET}.>")
    if not user.provisions:  # dead letters in its own name
        for name in sorted({user.name, READER, *user.consumes}):
            publish += [f"dead.*.{name}", f"dead.*.{name}.*"]
    if user.detects:
        publish += [*streams.DETECTED.subjects, f"{_API}STREAM.MSG.DELETE.{streams.DETECTED.name}"]
    written = {streams.stream_of_subject(subject) for subject in user.publishes} | _own_letters(user)
    for bucket in sorted({*user.stores, *map(streams.claims_bucket, written)}):
        publish += [f"$O.{bucket}.>", f"{_API}STREAM.PURGE.{streams.bucket_stream(bucket)}"]
    publish += [f"{_API}STREAM.MSG.DELETE.{stream}" for stream in user.trims]
    return publish + [f"{_API}STREAM.PURGE.{stream}" for stream in user.purges]


def _rights_to_read(user: User) -> list[str]:
    """Return the subjects to which a user may publish in order to read streams without a consumer, and objects of
    buckets. Those that it writes are among them, because a publish that is repeated looks for its first attempt."""
    streams_read = {*user.reads, *(streams.consumer(name).stream for name in user.consumes)} & {*EVENT_STREAMS}
    streams_read |= _own_letters(user)
    written = {streams.stream_of_subject(subject) for subject in user.publishes}
    buckets = {*user.fetches, *user.stores, *map(streams.claims_bucket, streams_read | written)}
    detected = [streams.DETECTED.name] if user.detects else []
    publish = [f"{_API}STREAM.NAMES"]
    for stream in sorted({*streams_read, *map(streams.bucket_stream, buckets), *detected}):
        gets = ("STREAM.INFO.{}", "STREAM.MSG.GET.{}", "DIRECT.GET.{}", "DIRECT.GET.{}.>")
        publish += [_API + get.format(stream) for get in gets]
    return publish


def _own_letters(user: User) -> set[str]:
    """Return the stream DEAD, in a set, for a user that publishes dead letters in its own name only, for which it
    checks whether one exists; an empty set for the operator, whose rights to DEAD stand in its row."""
    return set() if user.provisions else {"DEAD"}


def _rights_to_consume(user: User) -> list[str]:
    """Return the subjects to which a user may publish in order to take messages from consumers of `pipeline.streams`,
    and to ask for the lag of those in `awaits`."""
    publish = [f"{_API}CONSUMER.INFO.{c.stream}.{c.name}" for c in map(streams.consumer, user.awaits)]
    for spec in map(streams.consumer, user.consumes):
        consumer = f"{spec.stream}.{spec.name}"
        publish += [f"{_API}CONSUMER.INFO.{consumer}", f"{_API}CONSUMER.MSG.NEXT.{consumer}", f"$JS.ACK.{consumer}.>"]
    return publish


def _rights_to_fleet(user: User) -> list[str]:
    """Return the subjects to which a user may publish in order to write and read the bucket `FLEET`: its own records
    (`keeps`), and how often a message ended the process that handled it (`pipeline.log.deaths`)."""
    # The consumers of branches have names that are made later: "*", which `deaths_key` puts under `deaths.branch`.
    counted = [f"{streams.deaths_key(name)}.>" for name in (*user.consumes, *("*" for _ in user.branches))]
    publish = [streams.key_subject(streams.FLEET.name, keys) for keys in (*counted, *user.keeps)]
    bucket = streams.key_value_stream(streams.FLEET.name)
    publish += [f"{_API}STREAM.MSG.GET.{bucket}"] if publish else []
    return publish + ([f"{_API}STREAM.INFO.{bucket}"] if user.keeps else [])


def _rights_to_make_consumers(user: User) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the subjects to which a user may publish in order to make consumers, ephemeral ones of the streams that it
    follows and durable ones for its branches; and those to which it may not, although wildcards of the first match
    them: those of other users' consumers in `pipeline.streams`."""
    followed = [*user.follows, *([streams.key_value_stream(streams.FLEET.name)] if user.keeps else [])]
    allowed: list[str] = []
    denied: list[str] = []
    for stream in (*followed, *user.branches):
        durable = stream in user.branches
        verbs = ["CONSUMER.CREATE", "CONSUMER.INFO", "CONSUMER.MSG.NEXT"]
        verbs += ["CONSUMER.DURABLE.CREATE"] if durable else []
        prefixes = [f"{_API}{verb}.{stream}." for verb in verbs]
        allowed += [f"{prefix}*" for prefix in prefixes] + ([f"$JS.ACK.{stream}.*.>"] if durable else [])
        for spec in streams.CONSUMERS:
            if spec.stream == stream and spec.name not in user.consumes:
                denied += [prefix + spec.name for prefix in prefixes]
                denied += [f"$JS.ACK.{stream}.{spec.name}.>"] if durable else []
    return tuple(allowed), tuple(denied)


def _rights_to_provision() -> list[str]:
    """Return the subjects to which the operator may publish in order to create and update streams, consumers and
    buckets, and to delete dead letters."""
    return [
        *(f"{_API}STREAM.{verb}.*" for verb in ("CREATE", "UPDATE", "INFO")),
        *(f"{_API}CONSUMER.{verb}.*.>" for verb in ("CREATE", "DURABLE.CREATE", "INFO")),
        f"{_API}STREAM.MSG.DELETE.DEAD",
    ]


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
