"""Access to the log: one connection to NATS JetStream and what Journeyman asks of it (`pipeline.log.history` is how it reads).

Delivery is at least once; the effect is made exactly once by three means that all live here. A publish carries a
`Nats-Msg-Id`, so a retry inside the stream's window is one event. An event whose subject is its identity
(`unique_subject`) is published with the condition that the subject is empty, which holds for ever. And a consumer keeps
what it holds alive while it lives, so only a death (not a slow group) leads to redelivery.

Errors: `BrokerError` and below, of `pipeline.errors`; each says what to do.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import anyio
import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api

from pipeline import crash, streams
from pipeline.config import NatsConfig
from pipeline.errors import BrokerError as BrokerError
from pipeline.errors import BrokerUnavailableError as BrokerUnavailableError
from pipeline.errors import HistoryGoneError as HistoryGoneError
from pipeline.events import ClaimCheck, DeadLettered, Event, decode, encode, wire_name
from pipeline.log import credentials as access
from pipeline.log import objects, provision, retry
from pipeline.log.client import TidyClient
from pipeline.log.consumer import Consumption as Consumption
from pipeline.log.consumer import Delivery as Delivery
from pipeline.log.consumer import not_for as not_for
from pipeline.log.history import Raw, Reader
from pipeline.log.history import Recorded as Recorded
from pipeline.log.place import stream_time_us, told
from pipeline.log.publisher import Ack, Publisher
from pipeline.names import new_id
from pipeline.security.users import READER as READER
from pipeline.telemetry.logs import get_logger

log = get_logger("pipeline.log.broker")

_WRONG_LAST_SEQUENCE = 10071
_END = 2**63 - 1
_PASSED_BY = 10_000
# As plain text: an enumeration's member prints as its name.
_MSG_ID = api.Header.MSG_ID.value
_EXPECTED = api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value
_HEADERS_MARGIN = 4096
_SECOND_OPINION_S = 0.5


async def _close(client: TidyClient) -> None:
    """Close a connection, whatever state it is in."""
    with anyio.move_on_after(2, shield=True):
        try:
            if client.is_connected:
                await client.flush(timeout=1)
            await client.close()
        except (nats.errors.Error, OSError) as error:
            log.warning("closing", error=retry.reason(error))
    client.abandon()


def _garbage(payload: bytes) -> str:
    """Why a payload is neither an event nor a claim check; empty where it is one."""
    try:
        decode(payload)
    except msgspec.DecodeError as error:
        return str(error) or "undecodable"
    return ""


class Broker(Reader):
    """One connection; make it with `Broker.connect`."""

    def __init__(self, client: Client, config: NatsConfig, publisher: Publisher) -> None:
        super().__init__(client, config)
        self._publisher = publisher
        self._passed_by: OrderedDict[tuple[str, int, str], None] = OrderedDict()
        """Undecodable messages that reads met: stream, sequence, stream time."""

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, config: NatsConfig, *, name: str = "journeyman", provision: bool = True
    ) -> AsyncIterator[Broker]:
        """A broker at the servers of `config.url`, reconnecting to any of them for as long as the block runs. `name` decides the
        NATS user (`pipeline.security.users`).

        With `provision`, and unless the settings leave that to another, streams and consumers are made first.
        Raises `BrokerUnavailableError` where no server answers at first or it refuses the user, `ConfigError` where the
        settings name credentials that can't be used."""
        refused = ""
        looking = anyio.CancelScope(deadline=anyio.current_time() + config.connect_timeout_s)

        async def on_error(error: Exception) -> None:
            nonlocal refused
            if access.refuses(error):
                refused = retry.reason(error)
                # Trying again won't help, unless another server of a cluster knows better.
                looking.deadline = min(looking.deadline, anyio.current_time() + _SECOND_OPINION_S)
            if access.forbids(error):  # what was sent is lost, and whoever waits for an answer waits in vain
                log.error(
                    "the NATS user lacks a right",
                    error=retry.reason(error),
                    connection=name,
                    see="docs/streams.md",
                )
            else:
                log.warning("nats", error=retry.reason(error))

        client = access.make_client(config)
        options = access.options(config, name)
        publisher = Publisher(client, options["inbox_prefix"])
        try:
            # With endless reconnection nats-py tries for ever the first time too; that one is bounded here.
            with looking:
                await client.connect(
                    list(config.servers),
                    name=name,
                    error_cb=on_error,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.2,
                    connect_timeout=5,
                    allow_reconnect=True,
                    pending_size=64 * 1024 * 1024,
                    **options,
                )
            if looking.cancelled_caught:
                raise TimeoutError
        except (nats.errors.Error, OSError) as error:  # a TimeoutError is an OSError
            await _close(client)
            if refused:
                raise BrokerUnavailableError(
                    f"the NATS server at {config.address} does not take this connection ({refused}): check nats.users, "
                    "nats.nkey_seed, nats.credentials and nats.tls_*"
                ) from error
            raise BrokerUnavailableError(
                f"no NATS server answers at {config.address}: start it, or mend nats.url"
            ) from error
        broker = cls(client, config, publisher)
        try:
            await publisher.start()
            await retry.patiently(
                publisher.listens, "the first subscription was not confirmed", config.connect_timeout_s
            )
            if provision and config.provision:
                await broker.provision()
            yield broker
        finally:
            await _close(client)
            publisher.close()

    async def provision(self) -> None:
        """Make streams, consumers and buckets what the table in `pipeline.streams` says; data is never touched."""
        await provision.provision(self)

    async def provision_consumer(self, spec: streams.ConsumerSpec) -> None:
        """Make a consumer what `spec` says; what it has acknowledged stays so. One of the table is left alone if the
        settings leave provisioning to another user."""
        if not self.config.provision and spec in streams.CONSUMERS:
            return
        await provision.provision_consumer(self, spec)

    # -- publishing ----------------------------------------------------------------------------------------------

    async def publish(
        self, event: Event, headers: Mapping[str, str] | None = None, *, message_id: str = ""
    ) -> Ack:
        """Put `event` on the log and return once the server acknowledged it; safe to repeat. `message_id` other than the
        event's own is for one that the log held before and let go of.

        Retries while the server is away, for `publish_deadline_s`; then raises `BrokerUnavailableError`."""
        subject, payload = event.subject(), encode(event)
        if len(payload) + _HEADERS_MARGIN > self.client.max_payload:
            payload = await self._check_in(subject, payload, wire_name(event))
        sent = dict(headers or {})
        sent[_MSG_ID] = message_id or event.message_id()
        if event.unique_subject:
            sent[_EXPECTED] = "0"
        return await self._publish_until_acked(subject, payload, sent)

    async def publish_raw(
        self, subject: str, payload: bytes, headers: Mapping[str, str], *, message_id: str
    ) -> Ack:
        """Put bytes on a subject that holds one message only, ever: for what is no event of this version."""
        sent = {
            **headers,
            _MSG_ID: message_id,
            _EXPECTED: "0",
        }
        if len(payload) + _HEADERS_MARGIN > self.client.max_payload:
            payload = await self._check_in(subject, payload, "")
        return await self._publish_until_acked(subject, payload, sent, over_garbage=False)

    async def _publish_until_acked(
        self, subject: str, payload: bytes, headers: dict[str, str], *, over_garbage: bool = True
    ) -> Ack:
        """`over_garbage`: what lies on the subject and can't be decoded does not count as its event."""
        pause, deadline = retry.Pause(), time.monotonic() + self.config.publish_deadline_s
        why = ""
        while (left := deadline - time.monotonic()) > 0:
            try:
                crash.point("broker.before_publish")
                ack = await self._publisher.publish(
                    subject, payload, headers, min(left, self.config.ack_timeout_s)
                )
                crash.point("broker.after_publish")
                return ack
            except nats.errors.Error as error:
                code = getattr(error, "err_code", None)
                if code == _WRONG_LAST_SEQUENCE:
                    there = await self._taken(subject, headers, over_garbage)
                    if there is not None:
                        return there
                elif not retry.passes(error):
                    why = getattr(error, "description", None) or retry.reason(error)
                    raise BrokerError(f"the broker refused {subject}: {why}") from error
                why = retry.reason(error)
            await pause.wait()
        raise BrokerUnavailableError(
            f"{subject} was not acknowledged within {self.config.publish_deadline_s:.0f} s ({why}): is the NATS server "
            "up, its cluster in quorum, its stream there and its disk not full?"
        )

    async def _taken(self, subject: str, headers: dict[str, str], over_garbage: bool) -> Ack | None:
        """The message that came before ours, as an acknowledgement. None where there is none that counts: what is expected
        of the subject is corrected then, and the publish can be repeated."""
        stream, expected = streams.of_subject(subject), int(headers[_EXPECTED])
        found: int | None = None
        last = expected
        async for seq, name, more, data in self.messages(stream, expected + 1, _END, subject):
            last = seq
            if over_garbage and (why := _garbage(data)):
                await self.pass_by(stream, Raw(seq, name, more, data), why)
            else:
                found = seq
        if found is not None:
            return Ack(stream, found, duplicate=True)
        if last == expected:  # it was deleted, or retention took what was expected
            before = await self.leader_get(stream, {"last_by_subj": subject})
            last = before.seq if before is not None else 0
        headers[_EXPECTED] = str(last)
        return None

    async def pass_by(self, stream: str, raw: Raw, reason: str) -> None:
        """Put a message that a read can't decode among the dead letters: once, however often and by whomever it is read."""
        key = stream, raw.seq, raw.headers.get("Nats-Time-Stamp", "")
        if key in self._passed_by:
            return
        token = hashlib.sha256("/".join(map(str, key)).encode()).hexdigest()[:16]
        letter = DeadLettered(
            project="", stream=stream, stream_seq=raw.seq, stream_at=stream_time_us(raw.headers),
            original_subject=raw.subject, consumer=READER, reason="undecodable", detail=reason[:2000],
            payload=await self.whole(raw.payload), headers=raw.headers,
        )  # fmt: skip
        subject = f"{letter.subject()}.{raw.seq}-{token}"
        # The subject makes it one letter. A message id of its own lets it come back after it was taken off the list.
        await self.publish_raw(subject, encode(letter), {}, message_id=new_id("dead"))
        self._passed_by[key] = None
        if len(self._passed_by) > _PASSED_BY:
            self._passed_by.popitem(last=False)
        log.error("passed by", stream=stream, seq=raw.seq, subject=raw.subject, detail=reason[:300])

    async def _check_in(self, subject: str, payload: bytes, event: str) -> bytes:
        """A claim check for a payload that the server would not take."""
        digest = hashlib.sha256(payload).hexdigest()
        bucket = streams.claims_bucket(streams.of_subject(subject))
        await self.put_object(bucket, digest, payload)
        crash.point("broker.after_claim")
        return encode(ClaimCheck(object=digest, sha256=digest, size=len(payload), event=event, bucket=bucket))

    # -- consuming -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def consume(self, which: str | streams.ConsumerSpec) -> AsyncIterator[Consumption]:
        """A durable consumer: one of `pipeline.streams` by its name, or another, which is made where it is not there. What
        is held when the block ends goes back at once."""
        if isinstance(which, str):
            spec = streams.consumer(which)
        else:
            spec = which
            await self.provision_consumer(spec)
        sub = await self.js.pull_subscribe_bind(
            consumer=spec.name, stream=spec.stream, pending_msgs_limit=-1, pending_bytes_limit=-1
        )
        consumption = Consumption(self, spec, sub)
        async with anyio.create_task_group() as tg:
            tg.start_soon(consumption._keep_alive)
            try:
                yield consumption
            finally:
                tg.cancel_scope.cancel()
                with anyio.move_on_after(2, shield=True):
                    try:
                        for delivery in list(consumption.held):
                            await delivery.nak()
                        await sub.unsubscribe()
                    except nats.errors.Error as error:  # without a server they come again after `ack_wait_s`
                        log.warning("not given back", consumer=spec.name, error=retry.reason(error))

    async def _admit(self, message: Msg, spec: streams.ConsumerSpec) -> Delivery | None:
        meta = message.metadata
        seq, deliveries = int(meta.sequence.stream), int(meta.num_delivered or 1)
        if not_for(message, spec):
            await message.ack()
            return None
        if deliveries > spec.max_deliver:
            await self.bury(message, spec, "max_deliver", f"delivered {deliveries} times without success")
            return None
        try:
            event = await self.read(message.data)
        except (msgspec.DecodeError, HistoryGoneError) as error:
            await self.bury(message, spec, "undecodable", str(error))
            return None
        return Delivery(
            event, spec.stream, seq, message.subject, dict(message.headers or {}), deliveries,
            int(meta.num_pending or 0), message,
        )  # fmt: skip

    async def bury(self, message: Msg, spec: streams.ConsumerSpec, reason: str, detail: str) -> None:
        """Move a message that no one can use to the dead letters, then let the consumer go on."""
        deliveries, place = told(message.reply)
        payload = await self.whole(bytes(message.data))
        dead = DeadLettered(
            project="",
            stream=spec.stream,
            stream_seq=place.seq,
            stream_at=place.at,
            original_subject=message.subject,
            consumer=spec.name,
            reason=reason,
            detail=detail[:2000],
            deliveries=deliveries,
            payload=payload,
            headers=dict(message.headers or {}),
        )
        await self.publish(dead)
        await message.ack()
        log.error("dead letter", stream=spec.stream, seq=dead.stream_seq, reason=reason, detail=detail[:300])

    async def lag(self, prefix: str = "") -> int:
        """How many events the consumers whose names begin with `prefix` have not yet acknowledged."""
        waiting = 0
        for spec in streams.CONSUMERS:
            if spec.name.startswith(prefix):
                info = await self.consumer_info(spec.stream, spec.name)
                waiting += int(info.num_pending or 0) + int(info.num_ack_pending or 0)
        return waiting

    # -- objects -------------------------------------------------------------------------------------------------

    async def put_object(self, bucket: str, name: str, data: bytes) -> None:
        """Store `data` under `name`; the same name and content again is a no-op in effect. Retries as `publish` does."""
        await objects.put(self, bucket, name, data)
