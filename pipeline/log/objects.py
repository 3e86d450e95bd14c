"""Objects in JetStream's object store: adapters, and events that exceed the payload limit.

Adapters are named by the trainer, events of claim checks by their SHA-256 (`pipeline.log.broker`). NATS keeps a bucket
as a stream, which holds an object's *description* (`$O.<bucket>.M.<name>`) and its content in *chunks*
(`$O.<bucket>.C.<upload>`). They are written as nats-py writes them, so any NATS client can read them, in chunks that
fit the server's payload limit. They are read with direct gets instead of a subscription: if a server dies half-way, the
reader gets an error at a deadline instead of waiting for ever. If a replica answers before it has all chunks, their
number shows it, and the leader is asked for the rest.
"""

from __future__ import annotations

import base64
import hashlib
from contextlib import aclosing
from functools import partial

import msgspec
import nats.js.errors
from nats.js import api

from pipeline import crash, streams
from pipeline.errors import BrokerError, HistoryGoneError, StreamMissingError
from pipeline.log.retry import reason
from pipeline.log.stream_reader import StreamReader

_CHUNK = 128 * 1024
"""Bytes of a chunk, unless the server's payload limit is smaller."""
_CHUNK_MARGIN = 4096
"""Bytes under that limit which are left to a chunk's headers."""
_BATCH = 64
"""Chunks that are read at once: 8 MiB."""


class _Info(msgspec.Struct):
    """The bucket's description of an object, as far as reading needs it."""

    nuid: str = ""
    """Id of the upload, by which its chunks are found."""
    chunks: int = 0
    digest: str = ""
    deleted: bool = False


_decode_info = msgspec.json.Decoder(_Info).decode


async def put(reader: StreamReader, bucket: str, name: str, data: bytes) -> None:
    """Store `data` under `name`; the same name and content again changes nothing but the object's age.

    Repeated while the log is unavailable. Raises `BrokerUnavailableError` after `nats.publish_deadline_s`,
    `BrokerError` if the server refuses it, as with a full disk."""
    chunk = min(_CHUNK, max(1024, reader.client.max_payload - _CHUNK_MARGIN))

    async def once() -> None:
        store = await reader.js.object_store(bucket)
        crash.point("broker.before_upload")
        meta = api.ObjectMeta(name=name, options=api.ObjectMetaOptions(max_chunk_size=chunk))
        await store.put(name, data, meta)

    what = f"object {name} was not stored in {bucket}"
    try:
        await reader.retry(once, what)
    except nats.js.errors.Error as error:
        raise BrokerError(f"{what}: the NATS server refused it ({reason(error)})") from error


async def get(reader: StreamReader, bucket: str, name: str) -> bytes:
    """Return the object's bytes, digest checked. Raises `HistoryGoneError` if the bucket does not hold it, or its
    content does not match its digest three times."""
    for _ in range(3):
        try:
            info = await _info(reader, bucket, name)
        except StreamMissingError as error:
            raise HistoryGoneError(f"bucket {bucket}") from error
        if info is None:
            raise HistoryGoneError(f"object {name} of {bucket}")
        data = await _chunks(reader, bucket, info)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
        if info.digest == f"SHA-256={digest}":
            return data
        # Another upload of that name replaced the chunks after the description was read: read both again.
    raise HistoryGoneError(f"object {name} of {bucket} with the content it had")


async def exists(reader: StreamReader, bucket: str, name: str) -> bool:
    """Return whether the bucket holds an object of that name, by the leader."""
    return await _info(reader, bucket, name) is not None


async def remove(reader: StreamReader, bucket: str, name: str) -> None:
    """Remove an object and its chunks; one that is not there is removed already."""
    if not await exists(reader, bucket, name):
        return

    async def once() -> None:
        store = await reader.js.object_store(bucket)
        try:
            await store.delete(name)
        except nats.js.errors.NotFoundError:
            return  # an earlier attempt removed it

    await reader.retry(once, f"object {name} was not removed from {bucket}")


async def erase(reader: StreamReader, bucket: str, name: str) -> None:
    """Overwrite an object's chunks and descriptions on the servers' disks and remove them. One that is not there is
    erased already."""
    stream = streams.bucket_stream(bucket)
    info = await _info(reader, bucket, name)
    subjects = [f"$O.{bucket}.C.{info.nuid}"] if info is not None else []
    for subject in (*subjects, _description_subject(bucket, name)):
        async with aclosing(reader.messages(stream, subject=subject, batch=_BATCH)) as messages:
            async for message in messages:
                await reader.delete(stream, message.seq)


async def sweep(reader: StreamReader, bucket: str, before_us: int) -> int:
    """Remove chunks that belong to no object: those of uploads that never finished, and of removals that did not. Such
    chunks are left for now if the last one was written after `before_us` (stream time, microseconds): its upload may
    still run. Returns the number of uploads whose chunks were removed."""
    stream = streams.bucket_stream(bucket)
    # The chunks are listed first: an upload that ends meanwhile is then among the uploads of objects.
    chunk_subjects = await reader.subjects(stream, f"$O.{bucket}.C.*")
    uploads_of_objects = set()
    async with aclosing(reader.messages(stream, subject=f"$O.{bucket}.M.>")) as infos:
        async for message in infos:
            if message.payload and not (info := _decode_info(message.payload)).deleted:
                uploads_of_objects.add(info.nuid)
    swept = 0
    for subject in chunk_subjects:
        if subject.rpartition(".")[2] in uploads_of_objects:
            continue
        last = await reader.leader_get(stream, {"last_by_subj": subject})
        if last is not None and last.place.at < before_us:
            purge = partial(reader.js.purge_stream, stream, subject=subject)
            await reader.retry(purge, f"{subject} was not removed")
            swept += 1
    return swept


def _description_subject(bucket: str, name: str) -> str:
    """Return the subject of an object's description."""
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


async def _info(reader: StreamReader, bucket: str, name: str) -> _Info | None:
    """Return the description of an object, by the leader; None if there is no such object."""
    subject = _description_subject(bucket, name)
    described = await reader.leader_get(streams.bucket_stream(bucket), {"last_by_subj": subject})
    info = _decode_info(described.payload) if described is not None and described.payload else None
    return None if info is None or info.deleted else info


async def _chunks(reader: StreamReader, bucket: str, info: _Info) -> bytes:
    """Return the content of an object; less if chunks are missing, which its digest shows."""
    out: list[bytes] = []
    if info.chunks:
        subject = f"$O.{bucket}.C.{info.nuid}"
        async with aclosing(reader.messages(streams.bucket_stream(bucket), subject=subject, batch=_BATCH)) as chunks:
            async for message in chunks:
                out.append(message.payload)
                if len(out) == info.chunks:
                    break
    return b"".join(out)
