"""Create streams, consumers and buckets as the table in `pipeline.streams` and `nats.replicas` say, or update their
settings.

Messages are never touched. Settings that are right are left alone: in a cluster each change is an agreement of all
nodes. Every service does this at its start, so several may do it at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import nats.js.errors
from nats.js import api

from pipeline import streams
from pipeline.errors import BrokerError
from pipeline.log.retry import retry_while_unavailable
from pipeline.log.stream_reader import StreamReader

_LIMITS = ("description", "subjects", "max_age", "max_bytes", "discard", "duplicate_window", "num_replicas")
_STREAM_FIELDS = (*_LIMITS, "compression", "allow_direct", "allow_msg_ttl", "allow_msg_schedules")
_BUCKET_WINDOW_S = 120.0
"""NATS' own window of duplicates; the server refuses one that is longer than the stream's age."""
_MARKER_S = 60.0
"""How long the marker of an expired value stays in a key-value bucket."""
_CONSUMER_FIELDS = ("description", "ack_wait", "max_ack_pending", "max_deliver")


async def provision(reader: StreamReader) -> None:
    """Create or update all streams, consumers and buckets. Raises `BrokerError` if the server refuses one of them,
    `BrokerUnavailableError` if it does not answer."""

    async def once() -> None:
        specs = streams.streams_with_ages(reader.config.rollouts_max_age_s)
        for spec in (*specs, streams.DETECTED, streams.TIMERS):
            await _provision_stream(reader, spec)
        for consumer in streams.CONSUMERS:
            await _provision_consumer(reader, consumer)
        for bucket in streams.buckets(specs):
            await _provision_bucket(reader, bucket)
        await _provision_key_value(reader, streams.FLEET)

    await _retry_with_advice(reader, once)


async def provision_consumer(reader: StreamReader, spec: streams.ConsumerSpec) -> None:
    """Create or update one consumer; its acknowledgements stay. Raises as `provision` does."""
    await _retry_with_advice(reader, lambda: _provision_consumer(reader, spec))


async def _retry_with_advice(reader: StreamReader, call: Callable[[], Awaitable[None]]) -> None:
    """Await `call`, and repeat it while the log is unavailable. Raises as `provision` does; the error's text names the
    setting with which it may succeed."""
    config = reader.config
    what = (  # the server does not answer a request that its user may not make
        f"the NATS server at {config.address} answered no request for the log's streams (a user that may not create "
        "streams needs nats.provision = false)"
    )
    try:
        await retry_while_unavailable(call, what, config.connect_timeout_s)
    except nats.js.errors.APIError as error:
        hint = ": nats.replicas needs as many servers in the cluster" if config.replicas > 1 else ""
        raise BrokerError(
            f"the NATS server at {config.address} refused to create the log's streams: {error.description}{hint}"
        ) from error


async def _provision_stream(reader: StreamReader, spec: streams.StreamSpec) -> None:
    """Create or update a stream."""
    is_probed = spec not in (streams.DETECTED, streams.TIMERS)
    probe_subjects = (streams.alive_subject(spec.name),) if is_probed else ()
    wanted = api.StreamConfig(
        name=spec.name,
        description=spec.purpose,
        subjects=[*spec.subjects, *probe_subjects],
        retention=api.RetentionPolicy.WORK_QUEUE if spec.timers else api.RetentionPolicy.LIMITS,
        storage=api.StorageType.FILE,
        compression=api.StoreCompression.S2,
        max_age=spec.max_age_s,
        max_bytes=streams.byte_limit(spec.share, reader.config.max_bytes) if spec.share else -1,
        discard=api.DiscardPolicy(spec.discard),
        allow_msg_ttl=True,  # of probes (`pipeline.running.liveness`)
        duplicate_window=min(spec.duplicate_window_s, spec.max_age_s or spec.duplicate_window_s),
        num_replicas=reader.config.replicas,
        allow_direct=True,
        allow_msg_schedules=spec.timers,
    )
    await _ensure_stream(reader, wanted, spec.share)


async def _ensure_stream(reader: StreamReader, wanted: api.StreamConfig, share: float = 0.0) -> None:
    """Create a stream with the settings `wanted`, or update one that has others. `share`: its share of
    `nats.max_bytes`, by which its byte limit is computed; 0: that of `wanted` stays."""
    try:
        info = await reader.js.stream_info(str(wanted.name))
    except nats.js.errors.NotFoundError:
        await reader.js.add_stream(wanted)
        return
    if share:
        present_limit = -1 if info.config.max_bytes is None else info.config.max_bytes
        total, size = reader.config.max_bytes, info.state.bytes
        wanted.max_bytes = streams.byte_limit(share, total, present_limit=present_limit, size=size)
    if _has_other_settings(info.config, wanted, _STREAM_FIELDS):
        await reader.js.update_stream(wanted)


async def _provision_consumer(reader: StreamReader, spec: streams.ConsumerSpec) -> None:
    """Create or update a durable consumer. `add_consumer` replaces the settings of one that exists."""
    policy = api.DeliverPolicy.ALL if spec.start == "all" else api.DeliverPolicy.NEW
    wanted = api.ConsumerConfig(
        durable_name=spec.name,
        description=spec.purpose,
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=spec.ack_wait_s,
        deliver_policy=policy,
        filter_subjects=list(spec.subjects),
        max_ack_pending=spec.max_ack_pending,
        # Our own limit puts a message among the dead letters (`Broker.usable_event`): the server would only stop
        # delivering.
        max_deliver=-1,
    )
    try:
        existing = (await reader.js.consumer_info(spec.stream, spec.name)).config
    except nats.js.errors.NotFoundError:
        await reader.js.add_consumer(spec.stream, wanted)
        return
    filtered = existing.filter_subjects or [existing.filter_subject]
    if set(filtered) != set(spec.subjects) or _has_other_settings(existing, wanted, _CONSUMER_FIELDS):
        await reader.js.add_consumer(spec.stream, wanted)


async def _provision_bucket(reader: StreamReader, spec: streams.BucketSpec) -> None:
    """Create or update an object store bucket as the stream that NATS keeps it in, with nats-py's settings for one."""
    wanted = api.StreamConfig(
        name=streams.bucket_stream(spec.name),
        subjects=[f"$O.{spec.name}.C.>", f"$O.{spec.name}.M.>"],
        storage=api.StorageType.FILE,
        max_age=spec.max_age_s,
        max_bytes=streams.byte_limit(spec.share, reader.config.max_bytes),
        discard=api.DiscardPolicy.NEW,
        duplicate_window=min(_BUCKET_WINDOW_S, spec.max_age_s or _BUCKET_WINDOW_S),
        allow_rollup_hdrs=True,
        allow_direct=True,
        num_replicas=reader.config.replicas,
    )
    await _ensure_stream(reader, wanted, spec.share)


async def _provision_key_value(reader: StreamReader, spec: streams.KeyValueSpec) -> None:
    """Create a key-value bucket as the stream that NATS keeps it in: nats-py can't set the marker of expired values."""
    wanted = api.StreamConfig(
        name=streams.key_value_stream(spec.name),
        description=spec.purpose,
        subjects=[streams.key_subject(spec.name, ">")],
        max_msgs_per_subject=1,
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.NEW,
        duplicate_window=_BUCKET_WINDOW_S,
        deny_delete=True,
        allow_rollup_hdrs=True,
        allow_direct=True,
        allow_msg_ttl=True,
        # Followers of the bucket learn of an expired value by a marker, which is a message without a payload.
        subject_delete_marker_ttl=_MARKER_S,
        num_replicas=reader.config.replicas,
    )
    await _ensure_stream(reader, wanted)


def _has_other_settings(existing: Any, wanted: Any, fields: tuple[str, ...]) -> bool:
    """Return whether `existing` has another value than `wanted` in one of `fields`. Fields that are `None` in `wanted`
    do not count. `None` in `existing` counts as zero: the server leaves such values out."""
    set_values = {f: value for f in fields if (value := getattr(wanted, f)) is not None}
    return any((getattr(existing, f) or 0) != (value or 0) for f, value in set_values.items())
