"""The one table of NATS users: what each service may publish and subscribe to. Server configuration, docs and tests read it.

Rights are derived from what a service does (publishes these events, takes from those consumers, reads that stream), so that
a new event or consumer is one word in the table. Everything that is not allowed is refused by the server.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline import streams
from pipeline.security import nkey

OPERATOR = "operator"
READER = "reader"
"""In a dead letter, the consumer's name where a read without a consumer met the message."""
EVENT_STREAMS = tuple(s.name for s in streams.STREAMS)


@dataclass(frozen=True)
class User:
    """A NATS user. Every field lists what it may do; nothing else is allowed."""

    name: str
    purpose: str
    publishes: tuple[str, ...] = ()
    """Subjects of the events that it puts on the log. It may also store their oversized payloads."""
    consumes: tuple[str, ...] = ()
    """Durable consumers that it takes from: their names in `pipeline.streams`."""
    follows: tuple[str, ...] = ()
    """Streams that it reads through consumers of its own, without acknowledging."""
    branches: tuple[str, ...] = ()
    """Streams on which it makes durable consumers of its own. Those of the table stay out of reach."""
    reads: tuple[str, ...] = ()
    """Streams that it may read where they lie, with the oversized payloads of their events."""
    fetches: tuple[str, ...] = ()
    """Buckets whose objects it may read."""
    stores: tuple[str, ...] = ()
    """Buckets that it may also write to. Whoever may write to a bucket can replace and remove what it holds."""
    trims: tuple[str, ...] = ()
    """Streams of which it deletes single messages: retention."""
    probes: tuple[str, ...] = ()
    """Streams to which it writes the probes that tell whether they take messages (`pipeline.running.liveness`)."""
    listens: tuple[str, ...] = ()
    """Subjects of events that it hears as they are published."""
    provisions: bool = False
    """Whether it makes and changes streams, consumers and buckets, and deletes single messages. Never whole streams."""


USERS: tuple[User, ...] = (
    User(
        "gateway", "records trajectories, serves adapters",
        publishes=("rollout.>", "policy.loaded.>", "policy.unloaded.>", "policy.promoted.>"),
        follows=("ROLLOUTS", "POLICY", "GROUPS"),
        reads=("ROLLOUTS", "POLICY", "GROUPS"),
        fetches=(streams.ADAPTERS_BUCKET,),
        probes=("ROLLOUTS",),
    ),
    User(
        "judge", "scores groups",
        publishes=("group.>",),
        consumes=("judge",),
        reads=("ROLLOUTS", "GROUPS"),
    ),
    User(
        "trainer", "takes optimizer steps on the main branch",
        # No further token: a branch's checkpoints carry the branch as a sixth.
        publishes=("policy.checkpoint.*.*.*", "policy.retired.>", "group.discarded.>"),
        trims=("POLICY",),
        consumes=("trainer",),
        reads=("ROLLOUTS", "GROUPS", "POLICY"),
        stores=(streams.ADAPTERS_BUCKET,),
    ),
    User(
        "experiment", "trains another branch",
        publishes=("policy.checkpoint.*.*.*.*", "policy.retired.>", "group.discarded.>", "dead.GROUPS.*"),
        branches=("GROUPS",),
        reads=("ROLLOUTS", "GROUPS", "POLICY"),
        stores=(streams.ADAPTERS_BUCKET,),
    ),
    User(
        "store", "writes every event to Parquet",
        consumes=tuple(c.name for c in streams.CONSUMERS if c.name.startswith("store-")),
        reads=EVENT_STREAMS,
    ),
    User(
        "telemetry", "makes spans of events",
        consumes=tuple(c.name for c in streams.CONSUMERS if c.name.startswith("telemetry-")),
        reads=("ROLLOUTS", "GROUPS", "POLICY"),
    ),
    User(
        OPERATOR, "the supervisor and the `journeyman` commands: provisioning, status, dead letters, replay, rejudge",
        publishes=("rollout.>", "group.>", "policy.>", "dead.>"),
        reads=EVENT_STREAMS,
        fetches=(streams.ADAPTERS_BUCKET,),
        probes=EVENT_STREAMS,
        provisions=True,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Rights:
    """What the server allows a user, as NATS subjects; a denied subject is refused though an allowed one covers it."""

    publish: tuple[str, ...]
    never: tuple[str, ...]
    subscribe: tuple[str, ...]


def user(name: str) -> User:
    """Return the user of a service. Connections under any other name are the operator's."""
    return next((u for u in USERS if u.name == name), USERS[-1])


def inbox_prefix(name: str) -> str:
    """Return the prefix of a user's inboxes. It is the user's own, so that no other can read the replies to it."""
    return f"_INBOX_{name}"


def rights(who: User) -> Rights:
    """Return the subjects that the server allows `who`."""
    api = "$JS.API."
    publish = [*who.publishes, *(streams.alive_subject(s) for s in who.probes), f"{api}STREAM.NAMES"]
    never: list[str] = []
    consumed = [streams.consumer(name) for name in who.consumes]
    read = {*who.reads, *(c.stream for c in consumed)}
    fetched = {*who.fetches, *who.stores, *(streams.claims_bucket(s) for s in read)}
    stored = {*who.stores, *(streams.claims_bucket(streams.stream_of(s)) for s in who.publishes)}
    if not who.provisions:
        # What can't be used goes to the dead letters, under the name of the one that gave it up; is it there already?
        for name in sorted({who.name, READER, *who.consumes}):
            publish += [f"dead.*.{name}", f"dead.*.{name}.*"]
        read.add("DEAD")
        fetched.add(streams.claims_bucket("DEAD"))
        stored.add(streams.claims_bucket("DEAD"))
    publish += [f"{api}STREAM.MSG.DELETE.{stream}" for stream in who.trims]
    for bucket in sorted(stored):
        publish += [f"$O.{bucket}.>", f"{api}STREAM.PURGE.OBJ_{bucket}"]
    for stream in sorted(read | {f"OBJ_{b}" for b in fetched | stored}):
        publish += [
            f"{api}STREAM.INFO.{stream}",
            f"{api}STREAM.MSG.GET.{stream}",
            f"{api}DIRECT.GET.{stream}",
            f"{api}DIRECT.GET.{stream}.>",
        ]
    for spec in consumed:
        of = f"{spec.stream}.{spec.name}"
        publish += [f"{api}CONSUMER.INFO.{of}", f"{api}CONSUMER.MSG.NEXT.{of}", f"$JS.ACK.{of}.>"]
    for stream in (*who.follows, *who.branches):
        verbs = ["CONSUMER.CREATE", "CONSUMER.INFO", "CONSUMER.MSG.NEXT"]
        verbs += ["CONSUMER.DURABLE.CREATE"] if stream in who.branches else []
        publish += [f"{api}{verb}.{stream}.*" for verb in verbs]
        for spec in streams.CONSUMERS:
            if spec.stream == stream and spec not in consumed:
                never += [f"{api}{verb}.{stream}.{spec.name}" for verb in verbs]
                never += [f"$JS.ACK.{stream}.{spec.name}.>"] if stream in who.branches else []
        publish += [f"$JS.ACK.{stream}.*.>"] if stream in who.branches else []
    if who.provisions:
        publish += [f"{api}STREAM.{verb}.*" for verb in ("CREATE", "UPDATE", "INFO")]
        publish += [f"{api}CONSUMER.{verb}.*.>" for verb in ("CREATE", "DURABLE.CREATE", "INFO")]
        publish.append(f"{api}STREAM.MSG.DELETE.DEAD")
    return Rights(tuple(publish), tuple(never), (f"{inbox_prefix(who.name)}.>", *who.listens))


def seed_file(folder: Path, name: str) -> Path:
    """Return where the seed of a user lies."""
    return folder / f"{name}.nk"


def authorization(folder: Path, who: Iterable[User] = USERS) -> str:
    """Return the `authorization` block of a NATS server's configuration. It holds public keys only; a seed that `folder`
    lacks is made."""
    blocks = []
    for each in who:
        allowed = rights(each)
        publish = json.dumps({"allow": allowed.publish, "deny": allowed.never})
        subscribe = json.dumps({"allow": allowed.subscribe})
        key = nkey.load_or_make(seed_file(folder, each.name)).public
        blocks.append(
            f"    {{ nkey: {key}, permissions: {{ publish: {publish},\n      subscribe: {subscribe} }} }} # {each.name}\n"
        )
    return f"authorization {{\n  timeout: 10\n  users = [\n{''.join(blocks)}  ]\n}}\n"
