"""Objects in JetStream's object store: adapters, and events that exceed the payload limit.

Written as nats-py writes them, so any NATS client can read them, in chunks that fit the server's payload limit. Read with direct
gets instead of a subscription: a server that dies half-way is an error with a deadline, not a reader that waits for ever. A replica
that answers before it has all chunks is noticed by their number, and the leader is asked for the rest.
"""

from __future__ import annotations

import base64
import hashlib
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
import nats.js.errors
from nats.js import api

from pipeline import crash, streams
from pipeline.errors import HistoryGoneError, StreamMissingError
from pipeline.log.place import stream_time_us

if TYPE_CHECKING:
    from pipeline.log.broker import Broker
    from pipeline.log.history import Reader

_CHUNK = 128 * 1024
_CHUNK_MARGIN = 4096
_BATCH = 64


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
        replicas = broker.config.replicas
        if ((wanted.max_age or 0.0), wanted.max_bytes, wanted.num_replicas) != (
            spec.max_age_s,
            limit,
            replicas,
        ):
            wanted.max_age, wanted.max_bytes, wanted.num_replicas = spec.max_age_s, limit, replicas
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

    await broker.patiently(once, f"object {name} was not stored in {bucket}")


class _Info(msgspec.Struct):
    """What the bucket says of an object, as far as reading needs it."""

    nuid: str = ""
    chunks: int = 0
    digest: str = ""
    deleted: bool = False


_decode_info = msgspec.json.Decoder(_Info).decode


async def get(broker: Reader, bucket: str, name: str) -> bytes:
    """The object's bytes, digest checked; raises `HistoryGoneError` where it is not there."""
    stream, encoded = stream_of(bucket), base64.urlsafe_b64encode(name.encode()).decode()
    for _ in range(3):
        try:
            found = await broker.leader_get(stream, {"last_by_subj": f"$O.{bucket}.M.{encoded}"})
        except StreamMissingError as error:
            raise HistoryGoneError(f"bucket {bucket}") from error
        info = _decode_info(found.payload) if found is not None and found.payload else None
        if info is None or info.deleted:
            raise HistoryGoneError(f"object {name} of {bucket}")
        data = await _chunks(broker, bucket, info.nuid, info.chunks)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
        if info.digest == f"SHA-256={digest}":
            return data
        # Stored anew between the look and the reading, which takes the chunks of before: look again.
    raise HistoryGoneError(f"object {name} of {bucket} with the content it had")


async def there(broker: Reader, bucket: str, name: str) -> bool:
    """Whether an object of that name is in the bucket, by the leader."""
    encoded = base64.urlsafe_b64encode(name.encode()).decode()
    found = await broker.leader_get(stream_of(bucket), {"last_by_subj": f"$O.{bucket}.M.{encoded}"})
    return found is not None and bool(found.payload) and not _decode_info(found.payload).deleted


async def remove(broker: Broker, bucket: str, name: str) -> None:
    """Remove an object and its chunks; one that is not there is removed already."""
    if not await there(broker, bucket, name):
        return

    async def once() -> None:
        store = await broker.js.object_store(bucket)
        try:
            await store.delete(name)
        except nats.js.errors.NotFoundError:
            return  # by the attempt before

    await broker.patiently(once, f"object {name} was not removed from {bucket}")


async def sweep(broker: Broker, bucket: str, before_us: int) -> int:
    """Remove chunks that belong to no object and were written before `before_us` (stream time, microseconds): what a `put`
    that died left behind. Returns the number of such uploads."""
    stream, end = stream_of(bucket), 2**63 - 1
    # The chunks first: an object that appears after them is then among the owners.
    chunks = await broker.subjects(stream, f"$O.{bucket}.C.*")
    owned = set()
    async with aclosing(broker.messages(stream, 1, end, f"$O.{bucket}.M.>")) as infos:
        async for raw in infos:
            if raw.payload:
                owned.add(_decode_info(raw.payload).nuid)
    swept = 0
    for subject in chunks:
        if subject.rpartition(".")[2] in owned:
            continue
        last = await broker.leader_get(stream, {"last_by_subj": subject})
        if last is not None and stream_time_us(last.headers) < before_us:
            await broker.patiently(
                lambda subject=subject: broker.js.purge_stream(stream, subject=subject),  # type: ignore[misc]
                f"{subject} was not removed",
            )
            swept += 1
    return swept


async def _chunks(broker: Reader, bucket: str, nuid: str, count: int) -> bytes:
    subject = f"$O.{bucket}.C.{nuid}"
    out: list[bytes] = []
    if count:
        chunks = broker.messages(stream_of(bucket), 1, 2**63 - 1, subject, batch=_BATCH)
        async with aclosing(chunks):
            async for _, _, _, data in chunks:
                out.append(data)
                if len(out) == count:
                    break
    return b"".join(out)
