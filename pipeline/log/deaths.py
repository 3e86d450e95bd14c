"""How often one message has ended the process that handled it, for any number of processes and restarts.

The number is a value in the bucket `FLEET`, which any process of the consumer reads. It counts a death only where the
cause is known: the message was handled alone, or its handler raised. `pipeline.log.consumer` has the rule.
"""

from __future__ import annotations

from pipeline import streams
from pipeline.log import key_value
from pipeline.log.messages import Place
from pipeline.log.stream_reader import StreamReader

_KEPT_S = 86_400.0
"""How long a number is kept: longer than any message is delivered again and again."""


class Deaths:
    """How often each message ended the process in which one consumer handled it. Methods repeat requests, and raise
    `BrokerError`, as `key_value` does."""

    def __init__(self, log: StreamReader, spec: streams.ConsumerSpec) -> None:
        self._log = log
        self._prefix = streams.deaths_key(spec.name)

    def _key(self, stream: str, place: Place) -> str:
        """Return the key of a message's number. After a power cut another message may have its sequence, but no other
        has its time."""
        return f"{self._prefix}.{stream}.{place.seq}-{place.at}"

    async def count(self, stream: str, place: Place) -> int:
        """Return how often the message ended its process."""
        subject = streams.key_subject(streams.FLEET.name, self._key(stream, place))
        value = await self._log.leader_get(streams.key_value_stream(streams.FLEET.name), {"last_by_subj": subject})
        return int(value.payload) if value is not None and value.payload else 0

    async def record(self, stream: str, place: Place, deaths: int) -> None:
        """Replace the number. 0 deletes it."""
        key = self._key(stream, place)
        if deaths:
            await key_value.put(self._log, streams.FLEET.name, key, b"%d" % deaths, _KEPT_S)
        else:
            await key_value.delete(self._log, streams.FLEET.name, key)
