"""Values with a time to live in a key-value bucket (`pipeline.streams.FLEET`).

They are written as NATS clients write them, so `nats kv` reads them. Every value has a TTL, and its writer renews it by
writing it again. Sampler agents and gateways register here, the trainer of a branch takes its place, and the deaths of
messages are counted (`pipeline.log.deaths`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

import nats.js.errors

from pipeline import streams
from pipeline.log.follow import follow_subjects
from pipeline.log.stream_reader import WRONG_LAST_SEQUENCE, StreamReader


async def put(
    reader: StreamReader, bucket: str, key: str, value: bytes, ttl_s: float, headers: Mapping[str, str] = {}
) -> None:
    """Write a value, which expires after `ttl_s` seconds, at least 1; `headers`: further ones of the message.

    Repeated while the log is unavailable. Raises `BrokerUnavailableError` after `nats.publish_deadline_s`."""
    subject, timeout_s = streams.key_subject(bucket, key), reader.config.ack_timeout_s
    all_headers = {"Nats-TTL": f"{max(ttl_s, 1.0):g}s", **headers}  # the server takes no time below a second
    await reader.retry(
        lambda: reader.client.publish_acked(subject, value, all_headers, timeout_s), f"{subject} was not acknowledged"
    )


async def take(reader: StreamReader, bucket: str, key: str, value: bytes, ttl_s: float) -> bool:
    """Write a value unless the key has another one. Returns whether the key has this value now. If several writers
    write different values at once, it is true for one of them. Raises as `put` does."""
    stream, subject = streams.key_value_stream(bucket), streams.key_subject(bucket, key)
    while True:  # again if another writer was faster: its value is read then
        newest = await reader.leader_get(stream, {"last_by_subj": subject})
        if newest is not None and newest.payload not in (b"", value):
            return False
        after = {"Nats-Expected-Last-Subject-Sequence": str(newest.seq if newest is not None else 0)}
        try:
            await put(reader, bucket, key, value, ttl_s, after)
        except nats.js.errors.APIError as error:
            if error.err_code != WRONG_LAST_SEQUENCE:
                raise
        else:
            return True


async def delete(reader: StreamReader, bucket: str, key: str) -> None:
    """Delete a value. Followers of the key learn of it. Raises as `put` does."""
    await put(reader, bucket, key, b"", 60, {"KV-Operation": "DEL"})


async def follow(reader: StreamReader, bucket: str, keys: str) -> AsyncGenerator[tuple[str, bytes], None]:
    """Yield key and value of each write to `keys` (wildcards allowed), the present values first, for ever.

    The value is empty if the key was deleted or its value has expired."""
    prefix = len(streams.key_subject(bucket, ""))
    stream, subject = streams.key_value_stream(bucket), streams.key_subject(bucket, keys)
    async with aclosing(follow_subjects(reader, stream, [subject], lambda: 1)) as messages:
        async for message in messages:
            yield message.subject[prefix:], message.payload
