"""Objects in JetStream's object store: adapters, and events that exceed the payload limit.

Written as nats-py writes them, so any NATS client can read them, in chunks that fit the server's payload limit. Read with direct
gets instead of a subscription: a server that dies half-way is an error with a deadline, not a reader that waits for ever.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import anyio
import nats.errors
import nats.js.errors
from nats.js import api

from pipeline import crash, streams
from pipeline.errors import BrokerUnavailableError, HistoryGoneError

if TYPE_CHECKING:
    from pipeline.broker import Broker
    from pipeline.history import Reader

_CHUNK = 128 * 1024
_CHUNK_MARGIN = 4096
_BATCH = 64
T = TypeVar("T")


def stream_of(bucket: str) -> str:
    """The stream that holds a bucket."""
    return f"OBJ_{bucket}"


async def provision(broker: Broker) -> None:
    """Make the buckets what `pipeline.streams` says; objects are never touched."""
    for spec in streams.buckets():
        name, total = stream_of(spec.name), broker.config.max_bytes
        try:
            info = await broker.js.stream_info(name)
            wanted = info.config
        except nats.js.errors.NotFoundError:
            made = api.ObjectStoreConfig(
                bucket=spec.name, ttl=spec.max_age_s or None, replicas=broker.config.replicas,
                max_bytes=streams.byte_limit(spec.share, total),
            )  # fmt: skip
            await broker.js.create_object_store(spec.name, config=made)
            continue
        limit = streams.byte_limit(spec.share, total, now=wanted.max_bytes, held=info.state.bytes)
        if ((wanted.max_age or 0.0), wanted.max_bytes) != (spec.max_age_s, limit):
            wanted.max_age, wanted.max_bytes = spec.max_age_s, limit
            if spec.max_age_s:
                wanted.duplicate_window = min(wanted.duplicate_window or spec.max_age_s, spec.max_age_s)
            await broker.js.update_stream(wanted)


async def put(broker: Broker, bucket: str, name: str, data: bytes) -> None:
    """Store `data` under `name`; the same name and content again changes nothing but the object's age.

    Repeated while the server is away; raises `BrokerUnavailableError` after `nats.publish_deadline_s`."""
    chunk = min(_CHUNK, max(1024, broker.client.max_payload - _CHUNK_MARGIN))

    async def once() -> None:
        store = await broker.js.object_store(bucket)
        crash.point("broker.before_upload")
        meta = api.ObjectMeta(name=name, options=api.ObjectMetaOptions(max_chunk_size=chunk))
        await store.put(name, data, meta)

    await _patiently(broker, f"object {name} was not stored in {bucket}", once)


async def get(broker: Reader, bucket: str, name: str) -> bytes:
    """The object's bytes, digest checked; raises `HistoryGoneError` where it is not there."""

    async def once() -> bytes | None:
        store = await broker.js.object_store(bucket)
        try:
            info = await store.get_info(name)
        except nats.js.errors.NotFoundError as error:
            raise HistoryGoneError(f"object {name} of {bucket}") from error
        data = await _chunks(broker, bucket, str(info.nuid), int(info.chunks or 0))
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
        return data if info.digest == f"SHA-256={digest}" else None

    for _ in range(3):
        try:
            data = await _patiently(broker, f"object {name} of {bucket} was not answered", once)
        except nats.js.errors.BucketNotFoundError as error:
            raise HistoryGoneError(f"bucket {bucket}") from error
        if data is not None:
            return data
        # Stored anew between the look and the reading, which takes the chunks of before: look again.
    raise HistoryGoneError(f"object {name} of {bucket} with the content it had")


async def _chunks(broker: Reader, bucket: str, nuid: str, count: int) -> bytes:
    subject, seq = f"$O.{bucket}.C.{nuid}", 1
    out: list[bytes] = []
    while len(out) < count:
        page, _ = await broker.direct_get(
            stream_of(bucket), {"seq": seq, "next_by_subj": subject, "batch": min(_BATCH, count - len(out))}
        )
        if not page:
            break
        out += [m.data for m in page]
        seq = int((page[-1].headers or {})["Nats-Sequence"]) + 1
    return b"".join(out)


async def _patiently(broker: Reader, what: str, call: Callable[[], Awaitable[T]]) -> T:
    """`call` again while the server is away."""
    with anyio.move_on_after(broker.config.publish_deadline_s):
        while True:
            try:
                return await call()
            except nats.js.errors.APIError as error:
                if error.code not in (503, None):  # nats-py gives none where nobody answers
                    raise
            except (
                nats.errors.TimeoutError,
                nats.errors.ConnectionReconnectingError,
                nats.errors.OutboundBufferLimitError,
                nats.js.errors.NoStreamResponseError,
                BrokerUnavailableError,
            ):
                pass
            await anyio.sleep(0.1)  # paces the retry of a server that is away
    raise BrokerUnavailableError(
        f"{what} within {broker.config.publish_deadline_s:.0f} s: is the NATS server up and its disk not full?"
    )
