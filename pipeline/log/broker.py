"""Access to the log: one connection to NATS JetStream, to publish, consume and read (`pipeline.log.history`).

Delivery is at least once. The effect is exactly once, by three means. An event whose subject is its identity
(`unique_subject`) is published on condition that the subject is empty, and a call of a trajectory on condition that the
trajectory's last call is the one that its gateway knows; both hold for ever. Any other publish carries a `Nats-Msg-Id`,
so a retry within the stream's deduplication window is one event. And a consumer keeps its deliveries alive while it
lives, so only a death (not a slow group) leads to redelivery.

A message that exceeds the server's payload limit is stored as an object; a *claim check* that names the object takes
its place on the stream. A message that cannot be used is copied to the stream DEAD, as a *dead letter*.

Errors: `BrokerError` and its subclasses (`pipeline.errors`); each says what to do.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import anyio
import msgspec
import nats.errors
from nats.js import api

from pipeline import crash, streams
from pipeline.concurrency.backoff import Backoff
from pipeline.config import NatsConfig
from pipeline.errors import BrokerError as BrokerError
from pipeline.errors import BrokerUnavailableError as BrokerUnavailableError
from pipeline.errors import HistoryGoneError as HistoryGoneError
from pipeline.events import AnyEvent, ClaimCheck, DeadLettered, Event, decode, encode, wire_name
from pipeline.events.codec import decode_error
from pipeline.events.continuation import Form
from pipeline.log import credentials as access
from pipeline.log import objects, provision, retry
from pipeline.log.consumer import Consumption as Consumption
from pipeline.log.consumer import Delivery as Delivery
from pipeline.log.consumer import keep_alive
from pipeline.log.fast_client import Ack, FastClient, Pulled
from pipeline.log.history import Reader
from pipeline.log.messages import LogEntry as LogEntry
from pipeline.log.messages import StoredMessage, parse_ack_subject
from pipeline.log.pulling import pulling
from pipeline.log.stream_reader import WRONG_LAST_SEQUENCE
from pipeline.security.users import OPERATOR
from pipeline.security.users import READER as READER
from pipeline.telemetry.logs import get_logger

logger = get_logger("pipeline.log.broker")

_SKIPPED_REMEMBERED = 10_000
"""Undecodable messages that a broker remembers to be among the dead letters."""
# As plain text: an enumeration's member prints as its name.
_MSG_ID = api.Header.MSG_ID.value
_EXPECTED_LAST_SEQ = api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value
"""Header of a publish on a condition: the sequence of the last message on its subject. Such a publish carries no
message id, which the server would keep in memory for the stream's deduplication window."""
_RETRY_HEADER = streams.RETRY_HEADER.encode()
_HEADERS_MARGIN = 4096
"""Bytes that a message's headers may add to its payload under the server's limit."""
_OTHER_SERVERS_S = 0.5
"""Seconds to try the other servers of a cluster after one refused the user."""


async def _connect(config: NatsConfig, name: str) -> FastClient:
    """Return a connected client. Raises `BrokerUnavailableError` after `connect_timeout_s`, sooner if the user is
    refused."""
    refused = ""
    connecting = anyio.CancelScope(deadline=anyio.current_time() + config.connect_timeout_s)

    async def on_error(error: Exception) -> None:
        """Log an error of the connection, and give up connecting soon if the server refuses the user."""
        nonlocal refused
        if access.is_authentication_error(error):
            refused = retry.reason(error)
            # Trying again does not help, unless another server of the cluster knows the user.
            connecting.deadline = min(connecting.deadline, anyio.current_time() + _OTHER_SERVERS_S)
        if access.is_permission_error(error):
            # The server dropped the message: its sender waits for an answer in vain.
            logger.error(
                "the NATS user lacks a right",
                error=retry.reason(error),
                connection=name,
                see="streams.md of `journeywork docs`",
            )
        else:
            logger.warning("nats", error=retry.reason(error))

    client = access.make_client(config)
    options = access.options(config, name)
    try:
        # With endless reconnection nats-py makes its first attempt for ever, too: this bounds it.
        with connecting:
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
        if connecting.cancelled_caught:
            raise TimeoutError
    except (nats.errors.Error, OSError) as error:  # a TimeoutError is an OSError
        await _close(client)
        if refused:
            raise BrokerUnavailableError(
                f"the NATS server at {config.address} does not take this connection ({refused}): check nats.users, "
                "nats.nkey_seed and nats.tls_ca"
            ) from error
        raise BrokerUnavailableError(
            f"no NATS server answers at {config.address}: start it (`journeywork up` starts one), or correct nats.url"
        ) from error
    return client


async def _close(client: FastClient) -> None:
    """Close a connection in any state, within two seconds. Publishes that still wait fail."""
    with anyio.move_on_after(2, shield=True):
        try:
            if client.is_connected:
                await client.flush(timeout=1)
            await client.close()
        except (nats.errors.Error, OSError) as error:
            logger.warning("the connection was not closed cleanly", error=retry.reason(error))
    client.stop_publishing()
    client.close_socket()


def _log_letter(letter: DeadLettered) -> None:
    """Log that a message has become a dead letter."""
    logger.error(
        "dead letter", stream=letter.stream, seq=letter.stream_seq, reason=letter.reason, detail=letter.detail[:300]
    )


class Broker(Reader):
    """One connection; make it with `Broker.connect`."""

    def __init__(self, client: FastClient, config: NatsConfig) -> None:
        super().__init__(client, config)
        self._skipped: set[str] = set()
        """Undecodable messages that are among the dead letters: a read that meets one again asks the server nothing."""

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, config: NatsConfig, *, name: str = OPERATOR, provision: bool = True
    ) -> AsyncIterator[Broker]:
        """Connect to the servers of `config.url`, and reconnect to any of them for as long as the block runs. `name`
        decides the NATS user (`pipeline.security.users`).

        With `provision`, and unless the settings leave that to another user, streams and consumers are created first.
        Raises `BrokerUnavailableError` if no server answers at first or it refuses the user, `ConfigError` if the
        settings name credentials that can't be used."""
        client = await _connect(config, name)
        broker = cls(client, config)
        try:
            await client.start_publishing()
            await retry.retry_while_unavailable(
                client.flush_subscriptions, "the first subscription was not confirmed", config.connect_timeout_s
            )
            if provision and config.provision:
                await broker.provision()
            yield broker
        finally:
            await _close(client)

    async def provision(self) -> None:
        """Create or update streams, consumers and buckets as `pipeline.streams` says; messages are never touched."""
        await provision.provision(self)

    async def provision_consumer(self, spec: streams.ConsumerSpec) -> None:
        """Create or update a consumer; its acknowledgements stay. One of `pipeline.streams` is left alone if the
        settings leave provisioning to another user."""
        if self.config.provision or spec not in streams.CONSUMERS:
            await provision.provision_consumer(self, spec)

    # -- publishing ----------------------------------------------------------------------------------------------

    async def publish(
        self,
        event: Event,
        headers: Mapping[str, str] | None = None,
        *,
        message_id: str = "",
        form: Form | None = None,
        after: int | None = None,
    ) -> Ack:
        """Publish `event` and return once the server acknowledged it; safe to repeat. `form`: how the log shall hold an
        exchange (`pipeline.log.exchanges`). `after`: the sequence of the newest message on its subject that the caller
        has read, 0 if there is none. If there is a newer one, nothing is published, and the acknowledgement has
        `duplicate=True` and the sequence of that message, or of the event itself if an earlier attempt published it.
        `message_id`: another than the event's own, for an event that the log held before and lost. With `after` none is
        sent by default; where one is, a publish that repeats it is a duplicate of its message whatever came since.

        Retries while the log is unavailable, for `publish_deadline_s`; then raises `BrokerUnavailableError`."""
        subject = event.subject()
        payload = await self._within_limit(subject, encode(form or event), wire_name(event))
        all_headers = dict(headers or {})
        if event.unique_subject:
            after = 0
        if after is not None:
            all_headers[_EXPECTED_LAST_SEQ] = str(after)
        if message_id or _EXPECTED_LAST_SEQ not in all_headers:
            all_headers[_MSG_ID] = message_id or event.message_id()
        return await self._publish_until_acked(subject, payload, all_headers)

    async def publish_raw(
        self, subject: str, payload: bytes, headers: Mapping[str, str], *, message_id: str = ""
    ) -> Ack:
        """Publish bytes, which need not be an event of this version, to a subject that is empty. If it is not, nothing
        is published. With a `message_id`, an attempt whose acknowledgement was lost counts even if the message has
        been deleted since: needed where readers delete messages."""
        payload = await self._within_limit(subject, payload, "")
        all_headers = {**headers, _EXPECTED_LAST_SEQ: "0"}
        if message_id:
            all_headers[_MSG_ID] = message_id
        return await self._publish_until_acked(subject, payload, all_headers, replace_undecodable=False)

    async def _publish_until_acked(
        self, subject: str, payload: bytes, headers: dict[str, str], *, replace_undecodable: bool = True
    ) -> Ack:
        """Send a message until the server acknowledges it. `headers` may have a condition (`_EXPECTED_LAST_SEQ`); where
        it does not hold, `_settle_conflict` decides. With `replace_undecodable`, a message on the subject that is no
        event does not count as the event. Raises as `publish` does, and `BrokerError` if the server refuses it."""
        backoff, deadline = Backoff(), time.monotonic() + self.config.publish_deadline_s
        why = ""
        while (left := deadline - time.monotonic()) > 0:
            try:
                crash.point("broker.before_publish")
                ack = await self.client.publish_acked(subject, payload, headers, min(left, self.config.ack_timeout_s))
                crash.point("broker.after_publish")
                return ack
            except nats.errors.Error as error:
                if getattr(error, "err_code", None) == WRONG_LAST_SEQUENCE:
                    settled = await self._settle_conflict(subject, payload, headers, replace_undecodable)
                    if settled is not None:
                        return settled
                elif not retry.is_retryable(error):
                    why = getattr(error, "description", None) or retry.reason(error)
                    raise BrokerError(f"the NATS server refused {subject}: {why}") from error
                why = retry.reason(error)
            await backoff.wait()
        raise BrokerUnavailableError(
            f"{subject} was not acknowledged within {self.config.publish_deadline_s:.0f} s ({why}): is the NATS server "
            "up, its cluster in quorum, its stream there and its disk not full?"
        )

    async def _settle_conflict(
        self, subject: str, payload: bytes, headers: dict[str, str], replace_undecodable: bool
    ) -> Ack | None:
        """Return what a publish gets whose condition does not hold: an `Ack` with `duplicate=True` and the sequence of
        the event itself if an earlier attempt published it, else that of the conflicting message.

        Return None if no message conflicts any more: it was deleted, or is no event. The expected last sequence in
        `headers` is corrected then, and the publish can be repeated."""
        stream, expected = streams.stream_of_subject(subject), int(headers[_EXPECTED_LAST_SEQ])
        conflicting: int | None = None
        last = expected
        async for message in self.messages(stream, expected + 1, subject=subject):
            last = message.seq
            if message.payload == payload:
                return Ack(stream, message.seq, duplicate=True)
            if replace_undecodable and (why := decode_error(message.payload)):
                await self.skip_undecodable(stream, message, why)
            else:
                conflicting = message.seq
        if conflicting is not None:
            return Ack(stream, conflicting, duplicate=True)
        if last == expected:  # the expected message was deleted, or retention removed it
            before = await self.leader_get(stream, {"last_by_subj": subject})
            last = before.seq if before is not None else 0
        headers[_EXPECTED_LAST_SEQ] = str(last)
        return None

    async def _within_limit(self, subject: str, payload: bytes, event: str) -> bytes:
        """Return a payload that the server takes: a larger one is stored as an object, and its claim check is returned.
        `event`: the tag of the event in it, empty for bytes that need not be one."""
        if len(payload) + _HEADERS_MARGIN <= self.client.max_payload:
            return payload
        digest = hashlib.sha256(payload).hexdigest()
        bucket = streams.claims_bucket(streams.stream_of_subject(subject))
        await self.put_object(bucket, digest, payload)
        crash.point("broker.after_claim")
        return encode(ClaimCheck(object=digest, sha256=digest, size=len(payload), event=event, bucket=bucket))

    # -- timers --------------------------------------------------------------------------------------------------

    async def set_timer(self, event: Event, at: float) -> None:
        """Have the server deliver `event` to the consumers of due timers at `at` (Unix seconds), at once if that is
        past. A timer that is set for an event of the same subject is replaced. Retries as `publish` does."""
        headers = {
            "Nats-Schedule": f"@at {datetime.fromtimestamp(at, UTC).isoformat()}",
            "Nats-Schedule-Target": f"{streams.TIMER_DUE}.{event.subject()}",
        }
        await self._publish_until_acked(f"{streams.TIMER_SET}.{event.subject()}", encode(event), headers)

    async def cancel_timer(self, event: Event) -> None:
        """Remove the timer of an event, if it is set. Nothing is awaited: a lost request leaves the timer set."""
        headers = {"Nats-Rollup": "sub", "Nats-TTL": "1s"}
        await self.client.publish(f"{streams.TIMER_SET}.{event.subject()}", b"", headers=headers)

    async def put_object(self, bucket: str, name: str, data: bytes) -> None:
        """Store `data` under `name`; the same name and content again has no effect. Retries as `publish` does."""
        await objects.put(self, bucket, name, data)

    # -- dead letters --------------------------------------------------------------------------------------------

    async def skip_undecodable(self, stream: str, message: StoredMessage, reason: str) -> None:
        """Publish the dead letter of a message that a read could not decode, unless it is on the log already: any
        number of readers and reads give one letter."""
        name = f"{stream} {message.seq}-{message.place.at}"
        if name in self._skipped:
            return
        letter = await self._make_letter(stream, message, READER, "undecodable", reason)
        subject = f"{letter.subject()}.{message.seq}-{message.place.at}"
        if not (await self.publish_raw(subject, encode(letter), {})).duplicate:
            _log_letter(letter)
        if len(self._skipped) >= _SKIPPED_REMEMBERED:
            self._skipped.clear()
        self._skipped.add(name)

    async def dead_letter(self, message: Pulled, spec: streams.ConsumerSpec, reason: str, detail: str) -> None:
        """Copy a delivery that a consumer cannot use to the dead letters, then acknowledge it."""
        deliveries, place = parse_ack_subject(message.reply)
        stored = StoredMessage(place, message.subject, message.headers, message.data)
        letter = await self._make_letter(spec.stream, stored, spec.name, reason, detail, deliveries)
        await self.publish(letter)
        await self.client.publish(message.reply)
        _log_letter(letter)

    async def _make_letter(
        self, stream: str, message: StoredMessage, consumer: str, reason: str, detail: str, deliveries: int = 1
    ) -> DeadLettered:
        """Return the dead letter of a message. It holds the event itself, not a claim check: the object may be gone
        before somebody reads the letter."""
        return DeadLettered(
            project="",
            stream=stream,
            stream_seq=message.seq,
            stream_at=message.place.at,
            original_subject=message.subject,
            consumer=consumer,
            reason=reason,
            detail=detail[:2000],
            deliveries=deliveries,
            payload=await self.resolve(message.payload),
            headers=message.headers,
        )

    # -- consuming -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def consume(self, consumer: str | streams.ConsumerSpec) -> AsyncIterator[Consumption]:
        """Use a durable consumer: one of `pipeline.streams` by its name, or another, which is created if it does not
        exist. Deliveries that are held when the block ends go back at once."""
        if isinstance(consumer, str):
            spec = streams.consumer(consumer)
        else:
            spec = consumer
            await self.provision_consumer(spec)
        async with pulling(self.client, spec.stream, spec.name) as puller, anyio.create_task_group() as tg:
            consumption = Consumption(self, spec, puller, self.usable_event, self.dead_letter)
            tg.start_soon(keep_alive, self.client, spec, consumption.replies)
            failure: BaseException | None = None
            try:
                yield consumption
            except BaseException as error:
                failure = error
                raise
            finally:
                tg.cancel_scope.cancel()
                with anyio.move_on_after(2, shield=True):
                    try:
                        await puller.close()
                        await consumption.close(failure)
                    except (nats.errors.Error, BrokerError) as error:
                        # The server redelivers them after `ack_wait_s`.
                        logger.warning("deliveries not given back", consumer=spec.name, error=retry.reason(error))

    async def usable_event(self, message: Pulled, spec: streams.ConsumerSpec) -> AnyEvent | None:
        """Return the event of a delivery to the consumer `spec`. A message for another consumer (a retried dead letter)
        is acknowledged, one that cannot be used becomes a dead letter; both give None."""
        if message.header(_RETRY_HEADER) not in ("", spec.name):
            await self.client.publish(message.reply)
            return None
        if (deliveries := parse_ack_subject(message.reply)[0]) > spec.max_deliver:
            why = f"delivered {deliveries} times without success"
            await self.dead_letter(message, spec, "max_deliver", why)
            return None
        try:
            form = decode(message.data)
            if isinstance(form, ClaimCheck):
                message.size = form.size
            event = await self.event_of(form)
        except (msgspec.DecodeError, HistoryGoneError) as error:
            await self.dead_letter(message, spec, "undecodable", str(error))
            return None
        return event

    async def first_unread(self, spec: streams.ConsumerSpec) -> int | None:
        """Return the sequence from which on a consumer may not have acknowledged messages; `None` if it has
        acknowledged everything."""
        info = await self.consumer_info(spec)
        if not (info.num_pending or info.num_ack_pending):
            return None
        return int(info.ack_floor.stream_seq if info.ack_floor is not None else 0) + 1

    async def lag(self, prefix: str = "") -> int:
        """Return how many events the consumers whose names begin with `prefix` have not acknowledged yet."""
        infos = [await self.consumer_info(spec) for spec in streams.CONSUMERS if spec.name.startswith(prefix)]
        return sum(int(info.num_pending or 0) + int(info.num_ack_pending or 0) for info in infos)
