"""Passes calls of outside models on, and records them.

An outside model is a provider's model behind the gateway, which agents name in `model`; each of its providers is a
table of `[[outside]]` in the settings. `rollout_gateway.model_calls` gives the calls of such models to `Relay.answer`.
If the model has an apprentice, a policy that learns to replace it, some runs are answered by that and by the provider
only where it does not answer. An agent gets what its provider said, byte for byte. Only the end of an answer waits for
the record, as with a policy's answer. What breaks off at the provider breaks off for the agent too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec

from pipeline.config import OutsideConfig
from pipeline.events import now_us
from pipeline.names import outside_version
from pipeline.telemetry.logs import get_logger
from rollout_gateway.access.api_keys import Access
from rollout_gateway.capture.exchange import Caller, Exchange, Status
from rollout_gateway.capture.handler import CallHandler
from rollout_gateway.dialects.calls import Fields, SampledChoice
from rollout_gateway.http.errors import ApiError, ClientGoneError
from rollout_gateway.http.event_stream import EventBuffer, event_data
from rollout_gateway.http.request import HeaderList, Request
from rollout_gateway.http.upstream import UpstreamError, UpstreamInvalidError, UpstreamTimeoutError
from rollout_gateway.outside.answers import OutsideAnswer, Usage, replay_answer
from rollout_gateway.outside.providers import Provider, ProviderReply
from rollout_gateway.outside.requests import OutsideCall, read_call
from rollout_gateway.outside.shadow import Shadows

logger = get_logger("rollout_gateway.outside.relay")

_ERROR_BYTES = 2000
"""Bytes that the record keeps of an answer which is no JSON."""


@dataclass(eq=False)
class _OutsideExchange(Exchange):
    """A call of an outside model, from its request to its record."""

    call: OutsideCall
    usage: Usage | None = None
    cost_usd: float | None = None
    error: str = ""
    failed: list[str] = field(default_factory=list)
    """For each provider or apprentice that did not answer: its name or URL, and the reason."""

    def _own_fields(self, choice: SampledChoice) -> dict[str, Any]:
        """Return the fields of a choice's event: no tokens, and with the first choice what the whole call cost."""
        fields: dict[str, Any] = {
            "step": -1,
            "prompt_ids": b"",
            "sampled_ids": b"",
            "logprobs": b"",
            "error": self.error,
            "failed_providers": tuple(self.failed),
        }
        if self.usage is not None and (not self.answer.choices or choice is self.answer.choices[0]):
            fields |= {
                "input_tokens": self.usage.input,
                "cached_tokens": self.usage.cached,
                "output_tokens": self.usage.output,
                "cost_usd": self.cost_usd,
            }
        return fields


class NotAnsweredError(Exception):
    """The apprentice did not answer, so that its master does. Its text says who was asked, and why there is no
    answer."""


class Relay:
    """Answers the calls of outside models."""

    def __init__(self, tables: Iterable[OutsideConfig], calls: CallHandler, shadows: Shadows) -> None:
        """Raises `ConfigError` if the environment lacks a provider's key."""
        self._calls, self._shadows = calls, shadows
        self._providers = {table: Provider(table) for table in tables}
        self._tables: dict[str, list[OutsideConfig]] = {}
        for table in self._providers:
            self._tables.setdefault(table.name, []).append(table)

    def read(self, path: str, body: bytes) -> OutsideCall | None:
        """Return the call if it is one of an outside model, else `None`. Raises a 400 `ApiError`."""
        return read_call(path, body, self._tables) if self._tables else None

    async def close(self) -> None:
        """Close all connections."""
        for provider in self._providers.values():
            await provider.close()

    async def answer(
        self,
        request: Request,
        call: OutsideCall,
        caller: Caller,
        access: Access,
        apprentice: Callable[[], Awaitable[int]] | None = None,
    ) -> int:
        """Answer a call. `apprentice`: answers it in place of the provider, unless it raises `NotAnsweredError`.

        Returns the status. Raises `ApiError`, also where a stream has begun and the log does not take
        its record; `BrokerError` if the log can't be read for a retry; `ClientGoneError` if the agent left before the
        answer began."""
        run = caller.trajectory
        if run is not None and access.trajectory and call.params.model != run.opened.named:
            # Another model may cost more than the one who opened the run means to spend.
            what = f"This key is of a run of {run.opened.named!r}."
            message = f"{what} Call {call.params.model!r} with the key that opened the run."
            raise ApiError(400, "model_mismatch", message, param="model")
        exchange = _OutsideExchange(call, caller)
        if run is None:
            return await self._answer(request, exchange)
        run.begin()
        try:
            await run.log.masks.check_call(call.body)
            if caller.is_retry and (recorded := await self._calls.recorded_reply(exchange)) is not None:
                return await _repeat(request, call, recorded)
            if apprentice is not None:
                try:
                    return await apprentice()
                except NotAnsweredError as error:
                    exchange.failed.append(str(error))
            return await self._answer(request, exchange)
        finally:
            run.end()

    async def pass_on(self, request: Request, call: OutsideCall, rest: str) -> tuple[int, bytes, bytes, HeaderList]:
        """Post a request that samples nothing to `rest` below the dialect's path. Returns the provider's status, body,
        content type and other headers. Raises `ApiError`, and `ClientGoneError` if the agent left."""
        exchange = _OutsideExchange(call, Caller(cancellation=request.cancellation))
        with request.cancellation:
            reply = await self._ask(request, exchange, rest)
            try:
                return reply.status, await reply.read(), reply.content_type, reply.headers_for_agent
            except UpstreamError as error:
                raise _as_api_error(call, error) from error
            finally:
                reply.close()

    # -- one call --------------------------------------------------------------------------------------------------

    async def _answer(self, request: Request, exchange: _OutsideExchange) -> int:
        """Have a provider answer, and record the call. Returns the status. Raises as `answer`."""
        call = exchange.call
        try:
            with request.cancellation:
                reply = await self._ask(request, exchange)
        except (ClientGoneError, ApiError) as error:
            if exchange.version:
                await self._record_failure(exchange, OutsideAnswer(call, call.tables[-1]), error)
            raise
        try:
            if call.stream and reply.status == 200 and reply.content_type.startswith(b"text/event-stream"):
                await self._pass_on_stream(request, exchange, reply)
            else:
                await self._pass_on_whole(request, exchange, reply)
            return reply.status
        finally:
            reply.close()
            if exchange.seq >= 0 and exchange.status == "complete" and not exchange.caller.side_call:
                self._shadows.offer(exchange)

    async def _ask(self, request: Request, exchange: _OutsideExchange, rest: str = "") -> ProviderReply:
        """Ask the providers one after the other until one answers with another status than 429 and 5xx, or the last one
        has answered. A call that may have come to a provider which did not answer goes to no other, as it may be paid
        already. Raises `ApiError`, a 429 one if all have as many calls as they may."""
        call, rest = exchange.call, rest + "".join(request.target.partition("?")[1:])
        providers = [self._providers[table] for table in call.tables]
        free = [provider for provider in providers if not provider.is_full]
        exchange.failed += [f"{p.url}: outside.max_calls is reached" for p in providers if p not in free]
        failure = ApiError(429, "too_many_calls", "outside.max_calls of this model is reached. Try again.")
        for provider in free:
            exchange.version, exchange.replica = outside_version(call.params.model), provider.url
            exchange.started_at = now_us()
            is_last = provider is free[-1]
            try:
                reply = await provider.post(rest, request.headers, call.body_for(provider.table))
            except UpstreamError as error:
                failure = _as_api_error(call, error)
                if error.sent:
                    raise failure from error
                logger.warning("provider failed", url=provider.url, error=str(error))
            else:
                # An agent that followed a redirection would show the gateway's key to another server.
                redirects, failed = 300 <= reply.status < 400, reply.status == 429 or reply.status >= 500
                if not redirects and (is_last or not failed):
                    return reply
                reply.close()
                what = f"{reply.status}, a redirection: is outside.url right?" if redirects else str(reply.status)
                message = f"The provider of {call.params.model!r} answered {what}"
                failure = ApiError(502, "upstream_failed", message)
            if not is_last:
                exchange.failed.append(f"{provider.url}: {failure.message}")
        raise failure

    async def _pass_on_whole(self, request: Request, exchange: _OutsideExchange, reply: ProviderReply) -> None:
        """Give the agent an answer that is not streamed, once it is recorded. Raises `ApiError` and
        `ClientGoneError`."""
        answer = OutsideAnswer(exchange.call, reply.table)
        try:
            with request.cancellation:
                body = await reply.read()
        except (UpstreamError, ClientGoneError, ApiError) as broken:
            error = _as_api_error(exchange.call, broken) if isinstance(broken, UpstreamError) else broken
            await self._record_failure(exchange, answer, error)
            raise error from broken
        if reply.status != 200:
            answer.error = f"the provider answered {reply.status}"
        answer.read(body)
        if not answer.native:
            answer.native = {"error": {"message": body[:_ERROR_BYTES].decode(errors="replace")}}
        await self._record(exchange, answer, "failed" if answer.error else "complete")
        await request.answer(reply.status, body, reply.headers_for_agent + _run_header(exchange), reply.content_type)

    async def _pass_on_stream(self, request: Request, exchange: _OutsideExchange, reply: ProviderReply) -> None:
        """Pass a stream on to the agent. However it ends, its last events are held back until the call is recorded. If
        it broke off at the provider, or the log does not take the record, the agent's connection breaks without
        them."""
        answer, events = OutsideAnswer(exchange.call, reply.table), EventBuffer()
        last_events: list[bytes] = []
        """Held back until the call is recorded."""
        status: Status = "failed"
        broke_off = True
        await request.start([(b"content-type", reply.content_type), *reply.headers_for_agent, *_run_header(exchange)])
        try:
            with request.cancellation:
                while not answer.ended and (data := await reply.read_some()):
                    for event in map(reply.hide_key, events.add(data)):
                        exchange.first_token_at = exchange.first_token_at or now_us()
                        if not answer.feed_event(event_data(event)):
                            continue  # the usage, which the agent did not ask for
                        if answer.finishing:
                            last_events.append(event)
                        else:
                            await request.write(event)
            broke_off = False
            # A chat completion has said all before `[DONE]`, which some providers do not send.
            finished = answer.ended or (exchange.call.dialect == "chat" and answer.finishing)
            answer.error = answer.error or ("" if finished else "the stream ended before its last event")
            status = "failed" if answer.error else "complete"
        except ClientGoneError:
            status, answer.error = "cancelled", "the agent left before the end"
        except (ApiError, UpstreamError) as error:
            answer.error = f"the stream broke off: {error}"
        finally:  # also if this task is cancelled: what was sampled is recorded
            recording = self._begin_record(exchange, answer, status)
        if recording is not None:
            await asyncio.shield(recording)
        if not broke_off:
            await self._end_stream(request, reply, b"".join(last_events), events)

    async def _end_stream(
        self, request: Request, reply: ProviderReply, last_events: bytes, events: EventBuffer
    ) -> None:
        """Write the last events, which were held back, and what the provider sends after them."""
        await request.write(last_events)
        with suppress(ClientGoneError, ApiError, UpstreamError):
            with request.cancellation:
                # In one piece with the rest that is no whole event: the key may come in two parts.
                await request.write(await reply.read(bytes(events.rest)))
            await request.end()

    # -- the record ------------------------------------------------------------------------------------------------

    async def _record_failure(self, exchange: _OutsideExchange, answer: OutsideAnswer, error: Exception) -> None:
        """Record a call that was sent and not answered, if it belongs to a run. `error`: why there is no answer."""
        gone = isinstance(error, ClientGoneError)
        answer.error = "the agent left before the answer" if gone else str(error)
        await self._record(exchange, answer, "cancelled" if gone else "failed")

    async def _record(self, exchange: _OutsideExchange, answer: OutsideAnswer, status: Status) -> None:
        """Record a call if it belongs to a run, also if this task is cancelled. Raises a 503 `ApiError` if the log does
        not take it."""
        recording = self._begin_record(exchange, answer, status)
        if recording is not None:
            await asyncio.shield(recording)

    def _begin_record(
        self, exchange: _OutsideExchange, answer: OutsideAnswer, status: Status
    ) -> asyncio.Task[None] | None:
        """Begin the record of a call in a task, which goes on if the caller is cancelled; `None` if the call belongs to
        no run."""
        if status == "failed":
            logger.warning("call of an outside model failed", url=exchange.replica, error=answer.error)
        if not exchange.captured:
            return None
        exchange.usage = answer.usage()
        if exchange.usage is not None:
            exchange.cost_usd = exchange.usage.cost_usd(answer.table)
        exchange.error = answer.error
        # Whether a stream can be read shows only now.
        status = "failed" if status == "complete" and answer.error else status
        return self._calls.begin_record(exchange, answer.answer(), status)


async def _repeat(request: Request, call: OutsideCall, recorded: Fields) -> int:
    """Answer a client that repeats a call with the `recorded` answer, which it did not get: a plain answer as the
    provider wrote it, a stream with the same content in fewer events. Returns the status."""
    if not call.stream:
        await request.answer(200, bytes(recorded.get("native") or msgspec.json.encode(recorded)))
        return 200
    await request.start()
    await request.write(replay_answer(call, recorded))
    await request.end()
    return 200


def _run_header(exchange: Exchange) -> list[tuple[bytes, bytes]]:
    """Return the header that names the run of a captured call, which a client without the SDK could not know; no header
    for another call."""
    if not exchange.captured:
        return []
    return [(b"x-journeywork-trajectory", quote(exchange.recorded_in.id, safe="").encode())]


def _as_api_error(call: OutsideCall, error: UpstreamError) -> ApiError:
    """Return the error that an agent gets where a provider sent no answer that can be passed on."""
    provider = f"The provider of {call.params.model!r}"
    if isinstance(error, UpstreamInvalidError):
        return ApiError(502, "upstream_invalid", f"{provider} sent an answer that can't be passed on: {error}.")
    if isinstance(error, UpstreamTimeoutError):
        return ApiError(504, "upstream_timeout", f"{provider} did not answer within outside.timeout_s.")
    if not error.sent:
        return ApiError(502, "upstream_unreachable", f"{provider} can't be reached.")
    return ApiError(502, "upstream_broke_off", f"{provider} ended the connection before its answer was complete.")
