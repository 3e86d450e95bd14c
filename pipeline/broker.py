"""Access to the log: one connection to NATS JetStream and what Journeyman asks of it (`pipeline.history` is how it reads).

Delivery is at least once; the effect is made exactly once by three means that all live here. A publish carries a
`Nats-Msg-Id`, so a retry inside the stream's window is one event. An event whose subject is its identity
(`unique_subject`) is published with the condition that the subject is empty, which holds for ever. And a consumer keeps
what it holds alive while it lives, so only a death (not a slow group) leads to redelivery.

Errors: `BrokerError` and below, of `pipeline.errors`; each says what to do.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api

from pipeline import access, crash, objects, streams
from pipeline.config import NatsConfig
from pipeline.errors import BrokerError as BrokerError
from pipeline.errors import BrokerUnavailableError as BrokerUnavailableError
from pipeline.errors import HistoryGoneError as HistoryGoneError
from pipeline.events import ClaimCheck, DeadLettered, Event, encode, wire_name
from pipeline.history import Reader
from pipeline.history import Recorded as Recorded
from pipeline.log import get_logger
from pipeline.publisher import Ack, Publisher

log = get_logger("pipeline.broker")

_WRONG_LAST_SEQUENCE = 10071
# As plain text: an enumeration's member prints as its name.
_MSG_ID = api.Header.MSG_ID.value
_EXPECTED = api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value
_HEADERS_MARGIN = 4096
_SECOND_OPINION_S = 0.5


@dataclass(eq=False)
class Delivery(Recorded):
    """An event that a consumer holds until it says what became of it."""

    deliveries: int = 1
    pending: int = 0
    """How many more the consumer has waiting after this one."""
    _msg: Msg | None = None
    _held: set[Delivery] | None = None

    @property
    def reply(self) -> str:
        """The subject that answers to this delivery; it holds the place in the stream (`pipeline.place`)."""
        return str(self._msg.reply) if self._msg is not None else ""

    async def ack(self, *, confirmed: bool = False) -> None:
        """Done with it. `confirmed` waits until the server knows; without, a lost ack leads to redelivery."""
        assert self._msg is not None
        crash.point("broker.before_ack")
        if confirmed:
            await self._msg.ack_sync()
        else:
            await self._msg.ack()
        self._let_go()
        crash.point("broker.after_ack")

    async def nak(self, delay_s: float | None = None) -> None:
        """Give it back for another try."""
        assert self._msg is not None
        await self._msg.nak(delay=delay_s)
        self._let_go()

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.discard(self)


class Consumption:
    """A durable consumer in use; see `Broker.consume`."""

    def __init__(
        self, broker: Broker, spec: streams.ConsumerSpec, sub: JetStreamContext.PullSubscription
    ) -> None:
        self._broker, self.spec, self._sub = broker, spec, sub
        self.held: set[Delivery] = set()

    async def batch(self, limit: int, wait_s: float = 1.0) -> list[Delivery]:
        """Up to `limit` deliveries; an empty list where none came within `wait_s`."""
        try:
            messages = await self._sub.fetch(limit, timeout=wait_s)
        except (
            TimeoutError,
            nats.js.errors.FetchTimeoutError,
        ):  # nats-py raises its own and asyncio's bare one
            return []
        except nats.js.errors.ServiceUnavailableError as error:
            raise BrokerUnavailableError(
                f"consumer {self.spec.name} is gone: was its stream {self.spec.stream} deleted?"
            ) from error
        out = []
        for message in messages:
            delivery = await self._broker._admit(message, self.spec)
            if delivery is not None:
                delivery._held = self.held
                self.held.add(delivery)
                out.append(delivery)
        return out

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while True:
            for delivery in await self.batch(256):
                yield delivery

    async def _keep_alive(self) -> None:
        while True:
            await anyio.sleep(self.spec.ack_wait_s / 3)
            for delivery in list(self.held):
                assert delivery._msg is not None
                await delivery._msg.in_progress()


def not_for(message: Msg, spec: streams.ConsumerSpec) -> bool:
    """Whether a message is a dead letter that was given back to another consumer."""
    return bool(message.headers) and message.headers.get(streams.RETRY_HEADER, spec.name) != spec.name


class Broker(Reader):
    """One connection; make it with `Broker.connect`."""

    def __init__(self, client: Client, config: NatsConfig, publisher: Publisher) -> None:
        super().__init__(client, config)
        self._publisher = publisher

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, config: NatsConfig, *, name: str = "journeyman", provision: bool = True
    ) -> AsyncIterator[Broker]:
        """A broker at `config.url`, reconnecting for as long as the block runs. `name` decides the NATS user (`pipeline.users`).

        With `provision`, and unless the settings leave that to another, streams and consumers are made first.
        Raises `BrokerUnavailableError` where no server answers at first or it refuses the user, `ConfigError` where the
        settings name credentials that can't be used."""
        refused = ""
        looking = anyio.CancelScope(deadline=anyio.current_time() + config.connect_timeout_s)

        async def on_error(error: Exception) -> None:
            nonlocal refused
            if access.refuses(error):
                refused = str(error) or type(error).__name__
                # Trying again won't help, unless another server of a cluster knows better.
                looking.deadline = min(looking.deadline, anyio.current_time() + _SECOND_OPINION_S)
            log.warning("nats", error=str(error) or type(error).__name__)

        client = access.make_client(config)
        options = access.options(config, name)
        publisher = Publisher(client, options["inbox_prefix"])
        try:
            # With endless reconnection nats-py tries for ever the first time too; that one is bounded here.
            with looking:
                await client.connect(
                    config.url,
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
            await client.close()
            if refused:
                raise BrokerUnavailableError(
                    f"the NATS server at {config.url} does not take this connection ({refused}): check nats.users, "
                    "nats.nkey_seed, nats.credentials and nats.tls_*"
                ) from error
            raise BrokerUnavailableError(
                f"no NATS server answers at {config.url}: start it, or mend nats.url"
            ) from error
        broker = cls(client, config, publisher)
        try:
            await publisher.start()
            if provision and config.provision:
                await broker._provision_patiently()
            yield broker
        finally:
            with anyio.move_on_after(2, shield=True):
                if client.is_connected:
                    await client.flush(timeout=1)
                with contextlib.suppress(OSError):  # nats-py drains what a dead server has closed already
                    await client.close()
            publisher.close()

    # -- provisioning --------------------------------------------------------------------------------------------

    async def _provision_patiently(self) -> None:
        """The server may have died since it was connected to, or not have read its streams yet."""
        with anyio.move_on_after(self.config.connect_timeout_s):
            while True:
                try:
                    await self.provision()
                    return
                except (
                    nats.errors.TimeoutError,
                    nats.errors.NoRespondersError,
                    nats.errors.ConnectionReconnectingError,
                    nats.js.errors.ServiceUnavailableError,
                ) as error:
                    log.warning("provisioning again", error=str(error) or type(error).__name__)
                await anyio.sleep(0.2)  # paces the retry of a server that is away
        raise BrokerUnavailableError(
            f"the NATS server at {self.config.url} answers no JetStream request: is it on?"
        )

    async def provision(self) -> None:
        """Make streams, consumers and buckets what the table in `pipeline.streams` says; data is never touched."""
        for spec in streams.STREAMS:
            wanted = api.StreamConfig(
                name=spec.name,
                description=spec.purpose,
                subjects=[*spec.subjects, streams.alive_subject(spec.name)],
                retention=api.RetentionPolicy.LIMITS,
                storage=api.StorageType.FILE,
                compression=api.StoreCompression.S2,
                max_age=spec.max_age_s,
                max_bytes=streams.byte_limit(spec.share, self.config.max_bytes),
                discard=api.DiscardPolicy(spec.discard),
                allow_msg_ttl=True,  # of probes (`pipeline.liveness`)
                duplicate_window=spec.duplicate_window_s,
                num_replicas=self.config.replicas,
                allow_direct=True,
            )
            try:
                info = await self.js.stream_info(spec.name)
                wanted.max_bytes = streams.byte_limit(
                    spec.share, self.config.max_bytes, now=info.config.max_bytes, held=info.state.bytes
                )
                await self.js.update_stream(wanted)
            except nats.js.errors.NotFoundError:
                await self.js.add_stream(wanted)
        for consumer in streams.CONSUMERS:
            await self.provision_consumer(consumer)
        await objects.provision(self)

    async def provision_consumer(self, spec: streams.ConsumerSpec) -> None:
        """Make a consumer what `spec` says; what it has acknowledged stays so. One of the table is left alone if the
        settings leave provisioning to another user."""
        if not self.config.provision and spec in streams.CONSUMERS:
            return
        policy = api.DeliverPolicy.ALL if spec.start == "all" else api.DeliverPolicy.NEW
        await self.js.add_consumer(
            spec.stream,
            api.ConsumerConfig(
                durable_name=spec.name,
                description=spec.purpose,
                ack_policy=api.AckPolicy.EXPLICIT,
                ack_wait=spec.ack_wait_s,
                deliver_policy=policy,
                filter_subjects=list(spec.subjects),
                max_ack_pending=spec.max_ack_pending,
                # The limit is ours to enforce (`_admit`): the server would only stop delivering.
                max_deliver=-1,
            ),
        )

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
        return await self._publish_until_acked(subject, payload, sent)

    async def _publish_until_acked(self, subject: str, payload: bytes, headers: dict[str, str]) -> Ack:
        taken = False
        deadline = time.monotonic() + self.config.publish_deadline_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                if taken:
                    return await self._existing(subject)
                crash.point("broker.before_publish")
                ack = await self._publisher.publish(
                    subject, payload, headers, min(left, self.config.ack_timeout_s)
                )
                crash.point("broker.after_publish")
                return ack
            except nats.js.errors.APIError as error:
                if error.err_code == _WRONG_LAST_SEQUENCE:
                    taken = True
                    continue
                if error.code not in (503, None):  # nats-py gives none where nobody answers
                    raise BrokerError(f"the broker refused {subject}: {error.description}") from error
            except (
                nats.errors.TimeoutError,
                nats.errors.ConnectionReconnectingError,
                nats.js.errors.NoStreamResponseError,
                nats.errors.OutboundBufferLimitError,
            ):
                pass
            await anyio.sleep(0.1)  # paces the retry of a server that is away
        raise BrokerUnavailableError(
            f"{subject} was not acknowledged within {self.config.publish_deadline_s:.0f} s: is the NATS server up, "
            "its stream there and its disk not full?"
        )

    async def _existing(self, subject: str) -> Ack:
        stream = await self._stream_of(subject)
        found = await self.js.get_last_msg(stream, subject, direct=False)
        return Ack(stream, int(found.seq or 0), duplicate=True)

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
                    for delivery in list(consumption.held):
                        await delivery.nak()
                    await sub.unsubscribe()

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
        meta = message.metadata
        payload = await self.whole(bytes(message.data))
        dead = DeadLettered(
            project="",
            stream=spec.stream,
            stream_seq=int(meta.sequence.stream),
            original_subject=message.subject,
            consumer=spec.name,
            reason=reason,
            detail=detail[:2000],
            deliveries=int(meta.num_delivered or 1),
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
                info = await self.js.consumer_info(spec.stream, spec.name)
                waiting += int(info.num_pending or 0) + int(info.num_ack_pending or 0)
        return waiting

    async def _stream_of(self, subject: str) -> str:
        return str(await self.js.find_stream_name_by_subject(subject))

    # -- objects -------------------------------------------------------------------------------------------------

    async def put_object(self, bucket: str, name: str, data: bytes) -> None:
        """Store `data` under `name`; the same name and content again is a no-op in effect. Retries as `publish` does."""
        await objects.put(self, bucket, name, data)
