"""Reading messages where they lie, undecoded and without a consumer: one message, the messages of a subject, what a
stream holds.

A replicated stream has one leader, and only its answer is sure to hold everything that was acknowledged: the other
replicas lag by milliseconds, and for longer after a restart. So a decision rests on the leader's answer
(`STREAM.MSG.GET`). Many messages come by the server's batched direct get (NATS ADR-31), which any replica answers;
the leader is then asked whether there are more.

Every request is repeated while the log is unavailable, for `nats.publish_deadline_s`. Errors: `BrokerError` and its
subclasses.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio
import msgspec
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import api

from pipeline import streams
from pipeline.config import NatsConfig
from pipeline.errors import BrokerError, BrokerUnavailableError, StreamMissingError
from pipeline.log.fast_client import FastClient, parse_headers
from pipeline.log.messages import Place, StoredMessage, stream_time_us
from pipeline.log.retry import retry_while_unavailable

T = TypeVar("T")

LAST_SEQ = 2**63 - 1
"""The highest possible sequence."""
_BATCH = 1000
_PAGE_BYTES = 8 * 1024 * 1024
_TOO_MANY, _END_OF_BATCH = "413", "204"
"""Statuses of a direct get: its subjects are too many for the server; all messages of a batch have come."""
_NO_MORE = (_END_OF_BATCH, "404", "503")
"""Statuses after which no message comes: also that there is none, and that no replica answers."""
_CATCH_UP_S = 2.0
"""Time that a server which has just become a stream's leader gets to apply what the cluster has committed."""
_NO_MESSAGE, _NO_SEQUENCE, _NO_STREAM = 10037, 10043, 10059
"""JetStream's error codes for what does not exist."""
WRONG_LAST_SEQUENCE = 10071
"""JetStream's error code for a publish on the condition that a certain message is the last one on its subject, where
another one is."""


class _Stored(msgspec.Struct):
    """The leader's answer; `data` and `hdrs` are base64."""

    subject: str
    seq: int
    time: str
    data: str = ""
    hdrs: str = ""


class _TooManySubjectsError(BrokerError):
    """The server does not look up so many subjects in one request (1,024)."""


class _Answer(msgspec.Struct):
    """An answer of JetStream's API: a message, or why there is none."""

    message: _Stored | None = None
    error: dict[str, Any] | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


async def after_catching_up(holds: Callable[[], Awaitable[bool]]) -> bool:
    """Return the result of `holds`, which asks whether the log holds certain messages. If it is false, ask once more
    after `_CATCH_UP_S`: the server that answered may just have become the leader."""
    if await holds():
        return True
    await anyio.sleep(_CATCH_UP_S)
    return await holds()


class StreamReader:
    """Reads over one connection."""

    def __init__(self, client: FastClient, config: NatsConfig) -> None:
        self.client = client
        self.config = config
        self.js = client.jetstream(timeout=config.ack_timeout_s)

    async def retry(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        """Return the result of `call`, which is repeated while the log is unavailable, for `nats.publish_deadline_s`.
        `what` begins the error's sentence, such as "a read of POLICY was not answered"."""
        return await retry_while_unavailable(call, what, self.config.publish_deadline_s)

    # -- one message ---------------------------------------------------------------------------------------------

    async def leader_get(self, stream: str, request: dict[str, Any]) -> StoredMessage | None:
        """Return one message from the stream's leader: by `seq`, by `last_by_subj`, or the first from `seq` on of
        `next_by_subj`. None if the stream holds no such message."""
        try:
            data = await self._request(f"STREAM.MSG.GET.{stream}", request, f"a read of {stream}")
        except nats.js.errors.APIError as error:
            if error.err_code == _NO_MESSAGE:
                return None
            if error.err_code == _NO_STREAM:
                why = f"the log has no stream {stream}: run `journeywork up` on it once"
                raise StreamMissingError(why) from error
            raise BrokerError(f"a read of {stream} failed: {error.description}") from error
        stored = _decode_answer(data).message
        if stored is None:
            raise BrokerError(f"a read of {stream} was answered without a message")
        place, headers = Place(stored.seq, stream_time_us(stored.time)), parse_headers(base64.b64decode(stored.hdrs))
        return StoredMessage(place, stored.subject, headers, base64.b64decode(stored.data))

    async def holds(self, stream: str, place: Place) -> bool:
        """Return whether the message at `place` is in the stream, by its leader. False if retention removed it, too."""
        message = await self.leader_get(stream, {"seq": place.seq})
        return message is not None and place.matches(message.place)

    async def has_reached(self, stream: str, place: Place) -> bool:
        """Return whether the leader holds the message at `place`, or later ones: retention and erasures remove
        messages, but their sequences stay in use. False after the log lost its end."""

        async def once() -> bool:
            message = await self.leader_get(stream, {"seq": place.seq}) if place.seq else None
            if message is not None:
                return place.matches(message.place)
            return int((await self.stream_info(stream)).state.last_seq) >= place.seq

        return await after_catching_up(once)

    async def delete(self, stream: str, seq: int) -> bool:
        """Delete one message and overwrite it on the disk; one that is not there is deleted already. Returns whether
        this call deleted it; false, too, if it did and the server's answer was lost. Of several calls at once one gets
        true at most."""

        async def once() -> bool:
            try:
                await self.js.delete_msg(stream, seq)
            except nats.js.errors.APIError as error:
                # A server alone answers "no message found", whose code, 10057, stands for any failure.
                if error.description == "no message found" or error.err_code == _NO_SEQUENCE:
                    return False
                raise
            return True

        return await self.retry(once, f"message {seq} of {stream} was not deleted")

    # -- many messages -------------------------------------------------------------------------------------------

    async def messages(
        self, stream: str, first: int = 1, last: int = LAST_SEQ, subject: str = ">", *, batch: int = _BATCH
    ) -> AsyncGenerator[StoredMessage, None]:
        """Yield what the stream still holds on `subject` (wildcards allowed) from sequence `first` to `last`, in
        pages of `batch`."""
        while first <= last:
            page, _ = await self.message_page(stream, subject, first, min(batch, last - first + 1))
            page = page or await self.next_of_leader(stream, subject, first)
            for message in page:
                if message.seq > last:
                    return
                if not message.subject.startswith(streams.ALIVE):  # a probe is no event
                    yield message
            if not page:
                return
            first = page[-1].seq + 1

    async def message_page(
        self, stream: str, subject: str, first: int, batch: int = _BATCH
    ) -> tuple[list[StoredMessage], bool]:
        """Return messages on `subject` from sequence `first` on, as one replica holds them, and whether it holds
        more."""
        request = {"seq": first, "next_by_subj": subject, "batch": batch, "max_bytes": _PAGE_BYTES}
        page, more = await self._direct_get(stream, request)
        return page, more and bool(page)

    async def newest_messages(self, stream: str, subjects: Sequence[str]) -> list[StoredMessage]:
        """Return the newest message of every subject within `subjects` (wildcards allowed), in stream order.

        One replica answers with a page. It may lag, but what it holds has no gaps: if the result holds a certain
        message, it lacks nothing that is older. Each further page could come from another replica, so what does not fit
        into one is read up to the leader's end instead."""
        request: dict[str, Any] = {"multi_last": list(subjects), "batch": _BATCH, "max_bytes": _PAGE_BYTES}
        try:
            page, more = await self._direct_get(stream, request | {"seq": 1})
        except _TooManySubjectsError:
            more = True
        if not more:
            return page
        end = int((await self.stream_info(stream)).state.last_seq)
        newest: dict[str, StoredMessage] = {}
        for subject in subjects:
            async for message in self.messages(stream, last=end, subject=subject):
                newest[message.subject] = message
        return sorted(newest.values(), key=lambda m: m.seq)

    async def next_of_leader(self, stream: str, subject: str, first: int) -> list[StoredMessage]:
        """Return the first message that the leader holds on `subject` from sequence `first` on, as a list of at most
        one."""
        message = await self.leader_get(stream, {"seq": first, "next_by_subj": subject})
        return [] if message is None else [message]

    async def _direct_get(self, stream: str, request: dict[str, Any]) -> tuple[list[StoredMessage], bool]:
        """Send the server's batched direct get; return messages and whether there are more.

        Any replica answers, also one that lags. The list is empty if none answers at all: ask the leader then."""
        return await self.retry(lambda: self._direct_get_once(stream, request), f"a read of {stream} was not answered")

    async def _direct_get_once(self, stream: str, request: dict[str, Any]) -> tuple[list[StoredMessage], bool]:
        """Send the request once and collect the answers, one for each message; return the messages and whether there
        are more.

        Each answer has the sequence of the one before it, and an answer with status 204 ends the batch. If the
        connection breaks or the replica dies in between, the messages that came until then are returned with `True`:
        the caller asks for the rest, of any replica. Raises `BrokerUnavailableError` if none came."""
        inbox = self.client.new_inbox()
        answers = await self.client.subscribe(inbox)
        messages: list[StoredMessage] = []
        try:
            await self.client.publish(f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(request), reply=inbox)
            while True:
                answer: Msg = await answers.next_msg(timeout=self.config.ack_timeout_s)
                headers = dict(answer.headers or {})
                status = headers.get("Status")
                if status in _NO_MORE:
                    return messages, status == _END_OF_BATCH and int(headers.get("Nats-Num-Pending", "0")) > 0
                if status is not None:
                    kind = _TooManySubjectsError if status == _TOO_MANY else BrokerError
                    raise kind(f"a direct get from {stream} failed: {status} {headers.get('Description', '')}")
                last = messages[-1].seq if messages else 0
                if int(headers.get("Nats-Last-Sequence", last)) != last:  # an answer was lost
                    if not messages:
                        raise BrokerUnavailableError(f"a read of {stream} lost its beginning")
                    return messages, True
                place = Place(int(headers["Nats-Sequence"]), stream_time_us(headers["Nats-Time-Stamp"]))
                messages.append(StoredMessage(place, headers["Nats-Subject"], headers, answer.data))
        except nats.errors.TimeoutError as error:
            if messages:
                return messages, True
            raise BrokerUnavailableError(f"{stream} did not answer a read") from error
        finally:
            if not self.client.is_closed:
                await answers.unsubscribe()

    # -- what is there -------------------------------------------------------------------------------------------

    async def subjects(self, stream: str, subject: str) -> list[str]:
        """Return the subjects within `subject` (wildcards allowed) that hold a message, without reading messages."""
        out: list[str] = []
        while True:
            info = await self.subjects_info(stream, {"subjects_filter": subject, "offset": len(out)})
            page = info["state"].get("subjects") or {}
            out += page
            if not page or len(out) >= int(info.get("total", 0)):
                return out

    async def count_subjects(self, stream: str) -> int:
        """Return how many subjects of a stream hold a message; nats-py's description of a stream lacks it."""
        return int((await self.subjects_info(stream, {}))["state"].get("num_subjects", 0))

    async def subjects_info(self, stream: str, request: dict[str, Any]) -> dict[str, Any]:
        """Return JetStream's description of a stream with the subjects that `request` selects, as the server writes it:
        `{"state": {"num_subjects": …, "subjects": {subject: messages}}, "total": …}`."""
        data = await self._request(f"STREAM.INFO.{stream}", request, f"the list of subjects of {stream}")
        info: dict[str, Any] = msgspec.json.decode(data)
        return info

    async def stream_info(self, stream: str) -> api.StreamInfo:
        """Return the leader's description of a stream. Raises `BrokerError` if there is no such stream, and
        `BrokerUnavailableError` if none answers for `nats.publish_deadline_s`."""
        return await self._describe(lambda: self.js.stream_info(stream), f"stream {stream}")

    async def why_no_answer(self, stream: str) -> str:
        """Return why no server answered a request to a stream, as the part of a sentence: the stream does not exist, or
        has no leader, as in a cluster that lost a server, or had none at the time of the request."""
        try:
            await self.js.stream_info(stream)
        except nats.js.errors.NotFoundError:
            return f"the stream {stream} does not exist"
        except (nats.errors.Error, TimeoutError):
            return f"the stream {stream} has no leader"  # which would have answered
        return f"the stream {stream} had no leader for a moment"

    async def consumer_info(self, spec: streams.ConsumerSpec) -> api.ConsumerInfo:
        """Return the leader's description of a consumer. Raises `BrokerError` if there is no such consumer, and
        `BrokerUnavailableError` if none answers for `nats.publish_deadline_s`."""
        return await self._describe(lambda: self.js.consumer_info(spec.stream, spec.name), f"consumer {spec.name}")

    async def _describe(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        """Return nats-py's answer to `call`, which asks for the description of `what`."""
        try:
            return await self.retry(call, f"the description of {what} was not answered")
        except nats.js.errors.NotFoundError as error:
            raise BrokerError(f"the log has no {what}: run `journeywork up` on it once") from error

    async def _request(self, subject: str, request: dict[str, Any], what: str) -> bytes:
        """Send a request to JetStream's API and return the answer. `what` begins the error's sentence, such as "a read
        of POLICY". Raises nats-py's `APIError` if it is refused, `BrokerUnavailableError` if no answer comes."""

        async def once() -> bytes:
            reply = await self.client.request(
                f"$JS.API.{subject}", msgspec.json.encode(request), timeout=self.config.ack_timeout_s
            )
            data = bytes(reply.data)
            error = _decode_answer(data).error
            if error is not None:
                raise nats.js.errors.APIError.from_error(error)
            return data

        return await self.retry(once, f"{what} was not answered")
