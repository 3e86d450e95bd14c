"""Making streams, consumers and buckets what the table in `pipeline.streams` and `nats.replicas` say; data is never touched.

What is so already is left alone: in a cluster each change is an agreement of all nodes. Every service does this at its start, so
several may do it at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import nats.js.errors
from nats.js import api

from pipeline import streams
from pipeline.errors import BrokerError
from pipeline.log import objects
from pipeline.log.retry import patiently

if TYPE_CHECKING:
    from pipeline.log.broker import Broker

_STREAM_FIELDS = (
    "description", "subjects", "max_age", "max_bytes", "discard", "duplicate_window", "num_replicas", "compression",
    "allow_direct", "allow_msg_ttl",
)  # fmt: skip
_CONSUMER_FIELDS = ("description", "ack_wait", "max_ack_pending", "max_deliver")


async def provision(broker: Broker) -> None:
    """Everything. Raises `BrokerError` for what the server refuses, `BrokerUnavailableError` where it does not answer."""

    async def once() -> None:
        for spec in streams.STREAMS:
            await _stream(broker, spec)
        for consumer in streams.CONSUMERS:
            await _consumer(broker, consumer)
        await objects.provision(broker)

    await _refusals(broker, once)


async def provision_consumer(broker: Broker, spec: streams.ConsumerSpec) -> None:
    """One consumer; what it has acknowledged stays so. Raises as `provision` does."""
    await _refusals(broker, lambda: _consumer(broker, spec))


async def _refusals(broker: Broker, call: Callable[[], Awaitable[None]]) -> None:
    config = broker.config
    try:
        await patiently(
            call,
            f"the NATS server at {config.address} answered no JetStream request",
            config.connect_timeout_s,
        )
    except nats.js.errors.APIError as error:
        hint = ": nats.replicas needs as many servers in the cluster" if config.replicas > 1 else ""
        raise BrokerError(
            f"the NATS server at {config.address} refused to make the log's streams: {error.description}{hint}"
        ) from error


async def _stream(broker: Broker, spec: streams.StreamSpec) -> None:
    wanted = api.StreamConfig(
        name=spec.name,
        description=spec.purpose,
        subjects=[*spec.subjects, streams.alive_subject(spec.name)],
        retention=api.RetentionPolicy.LIMITS,
        storage=api.StorageType.FILE,
        compression=api.StoreCompression.S2,
        max_age=spec.max_age_s,
        max_bytes=streams.byte_limit(spec.share, broker.config.max_bytes),
        discard=api.DiscardPolicy(spec.discard),
        allow_msg_ttl=True,  # of probes (`pipeline.running.liveness`)
        duplicate_window=spec.duplicate_window_s,
        num_replicas=broker.config.replicas,
        allow_direct=True,
    )
    try:
        info = await broker.js.stream_info(spec.name)
    except nats.js.errors.NotFoundError:
        await broker.js.add_stream(wanted)
        return
    there = info.config
    wanted.max_bytes = streams.byte_limit(
        spec.share, broker.config.max_bytes, now=there.max_bytes, held=info.state.bytes
    )
    if _differ(there, wanted, _STREAM_FIELDS):
        await broker.js.update_stream(wanted)


async def _consumer(broker: Broker, spec: streams.ConsumerSpec) -> None:
    policy = api.DeliverPolicy.ALL if spec.start == "all" else api.DeliverPolicy.NEW
    wanted = api.ConsumerConfig(
        durable_name=spec.name,
        description=spec.purpose,
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=spec.ack_wait_s,
        deliver_policy=policy,
        filter_subjects=list(spec.subjects),
        max_ack_pending=spec.max_ack_pending,
        # The limit is ours to enforce (`Broker._admit`): the server would only stop delivering.
        max_deliver=-1,
    )
    try:
        there = (await broker.js.consumer_info(spec.stream, spec.name)).config
    except nats.js.errors.NotFoundError:
        await broker.js.add_consumer(spec.stream, wanted)
        return
    filtered = there.filter_subjects or [there.filter_subject]
    if set(filtered) != set(spec.subjects) or _differ(there, wanted, _CONSUMER_FIELDS):
        await broker.js.add_consumer(spec.stream, wanted)


def _differ(there: Any, wanted: Any, fields: tuple[str, ...]) -> bool:
    """Whether a setting is not as wanted; a server leaves out what is zero."""
    return any((getattr(there, f) or 0) != (getattr(wanted, f) or 0) for f in fields)
