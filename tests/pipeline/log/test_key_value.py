"""Values with a time to live: what a follower of the bucket sees."""

from contextlib import aclosing

import anyio

from pipeline import streams
from pipeline.log import key_value
from pipeline.log.broker import Broker

BUCKET = streams.FLEET.name


async def test_a_follower_sees_present_values_changes_deletions_and_expiry(broker: Broker) -> None:
    for value in (b"old", b"new"):
        await key_value.put(broker, BUCKET, "sampler.p.a", value, 60)
    await key_value.put(broker, BUCKET, "gateway.p.g", b"other", 60)
    async with aclosing(key_value.follow(broker, BUCKET, "sampler.p.*")) as seen:
        with anyio.fail_after(60):
            assert await anext(seen) == ("sampler.p.a", b"new")
            bucket = await broker.js.key_value(BUCKET)  # any client of NATS reads the values
            assert (await bucket.get("sampler.p.a")).value == b"new"
            await key_value.delete(broker, BUCKET, "sampler.p.a")
            assert await anext(seen) == ("sampler.p.a", b"")
            await key_value.put(broker, BUCKET, "sampler.p.b", b"short", 3)
            assert await anext(seen) == ("sampler.p.b", b"short")
            assert await anext(seen) == ("sampler.p.b", b"")
