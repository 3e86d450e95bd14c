"""The answer to a model call whose key is checked and whose body has come. `app` calls `ModelCalls.answer`.

A promoted prompt is put into the call, which is then read (`dialects`). Its trajectory is found (`capture.identity`),
and it is answered by a policy (`capture.handler`) or by an outside model, which is a provider's (`outside.relay`). An
outside model whose run was given to a policy, its apprentice, is that policy's master.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec

from pipeline.names import check_name
from pipeline.telemetry.logs import get_logger
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.gateway import Gateway
from rollout_gateway.api.trajectories import traceparent
from rollout_gateway.capture.exchange import Caller
from rollout_gateway.capture.handler import UnsureError
from rollout_gateway.capture.identity import decode_header, named_run
from rollout_gateway.dialects.calls import CHAT, COMPLETIONS, Call
from rollout_gateway.dialects.endpoints import read_chat, read_completion
from rollout_gateway.dialects.messages import MessagesTranslation, error_body
from rollout_gateway.dialects.prompts import Sent, read_sent, with_prompt
from rollout_gateway.dialects.responses import ResponsesTranslation, unknown_reference
from rollout_gateway.dialects.translate import TranslatedSink, Translation
from rollout_gateway.http.errors import ApiError
from rollout_gateway.http.request import Headers, Request
from rollout_gateway.outside.relay import NotAnsweredError
from rollout_gateway.outside.requests import OutsideCall

logger = get_logger("rollout_gateway.model_calls")


_READERS: dict[str, Callable[[bytes], Call]] = {CHAT: read_chat, COMPLETIONS: read_completion}
_TRANSLATIONS: dict[str, Callable[[bytes], Translation]] = {
    ResponsesTranslation.path: ResponsesTranslation,
    MessagesTranslation.path: MessagesTranslation,
}
PATHS = _READERS.keys() | _TRANSLATIONS.keys()
"""Paths of model calls."""

_Read = TypeVar("_Read")
_LARGE_BODY = 256 * 1024
"""Bytes. Smaller bodies are decoded within a few milliseconds."""
_NOT_FOR_MASTER = ("not_recorded", "stopping", "trajectory_completed", "trajectory_expired")
"""Errors of an apprentice's call for which its master is not asked: its answer could not be recorded either."""
SIDE_CALL_HEADER = b"x-journeywork-side-call"
ROLE_HEADER = b"x-journeywork-role"


@dataclass(eq=False, slots=True)
class ModelRequest:
    """A model call whose key is checked."""

    request: Request
    access: Access
    path: str
    """Path of the URL, without the trajectory that it may begin with."""
    trajectory: str
    """The trajectory that the URL names; empty if it names none."""
    prompt: str = ""
    """Id of the promoted prompt that was put into the call; empty if none was."""
    sent: Sent | None = None
    """What the call said before that."""


class ModelCalls:
    """Answers model calls."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._calls, self._call_identifier = gateway, gateway.calls, gateway.call_identifier
        self._large_bodies = anyio.CapacityLimiter(1)

    async def answer(self, asked: ModelRequest) -> int:
        """Answer a model call. Returns the status. Raises `ApiError`, `BrokerError` and `ClientGoneError`."""
        await self._put_prompt(asked)
        call, translation = await self._read_large_in_thread(asked, partial(self._read_call, asked))
        if translation is not None:
            return await self._translated_call(asked, translation, call)
        caller = await self._caller(call, asked)
        if isinstance(call, OutsideCall):
            ask = partial(self._ask_apprentice, asked, call, caller)
            apprentice = ask if _apprentice_has_run(caller, call) else None
            return await self._gateway.relay.answer(asked.request, call, caller, asked.access, apprentice)
        return await self._plain_call(asked.request, call, caller)

    async def _plain_call(self, request: Request, call: Call, caller: Caller) -> int:
        """Answer a call of vLLM's own API. Returns the status."""
        status, answer = await self._calls.answer(call, caller, request if call.stream else None)
        _check_apprentice_answered(caller, status)
        if not request.started:
            await request.answer(status, answer)
        return status

    async def _ask_apprentice(self, asked: ModelRequest, call: OutsideCall, caller: Caller) -> int:
        """Answer a call of an outside model by the apprentice that has its run. Returns the status.

        Raises `NotAnsweredError` if its master is to answer, because the apprentice is unsure, late or refused; and
        `ApiError`. `Relay.answer` calls it."""
        assert caller.trajectory is not None
        opened, wait_s = caller.trajectory.opened, call.tables[0].apprentice_wait_s
        try:
            own, translation = await self._read_large_in_thread(asked, partial(self._read_for_policy, asked))
            own.params.model, own.held = opened.model, opened.min_logprob is not None and own.stream
            own.detected = call.detected
            caller = replace(caller, wait_s=wait_s, min_logprob=opened.min_logprob)
            if translation is not None:
                return await self._translated_call(asked, translation, own, caller)
            return await self._plain_call(asked.request, own, caller)
        except (ApiError, UnsureError) as error:
            final = isinstance(error, ApiError) and (not wait_s or error.code in _NOT_FOR_MASTER)
            if asked.request.started or final:
                raise
            raise NotAnsweredError(f"{opened.pinned or opened.model}: {error}") from error

    async def _put_prompt(self, asked: ModelRequest) -> None:
        """Put a promoted prompt in place of the agent's, if a decision in force has one for the call."""
        if not self._gateway.router.has_prompts():
            return
        request, access = asked.request, asked.access
        sent = await self._read_large_in_thread(asked, partial(read_sent, request.body))
        metadata = None if asked.path in _TRANSLATIONS else sent.metadata  # its `metadata` names no run
        run = access.trajectory or named_run(asked.trajectory, request.headers, metadata).trajectory
        opening = await self._gateway.registry.opening(run) if run else None
        if opening is not None and not (access.trajectory or access.owns(opening.owner)):
            return  # the call is refused, as for a run that does not exist
        decision = self._gateway.router.prompt_for(sent.model, opening)
        if decision is None:
            return
        put = partial(with_prompt, asked.path, request.body, decision.replaces, decision.prompt)
        if (body := await self._read_large_in_thread(asked, put)) is not None:
            request.body, asked.prompt, asked.sent = body, decision.prompt_id, sent

    def _read_for_policy(self, asked: ModelRequest) -> tuple[Call, Translation | None]:
        """Read and check the body of a call that a policy answers."""
        path, body = asked.path, asked.request.body
        translation = _TRANSLATIONS[path](body) if path in _TRANSLATIONS else None
        call = translation.call() if translation is not None else _READERS[path](body)
        self._gateway.permitted.check(call.fields)
        return call, translation

    def _read_call(self, asked: ModelRequest) -> tuple[Call, Translation | None]:
        """Read and check the body of a model call."""
        outside = self._gateway.relay.read(asked.path, asked.request.body)
        return (outside, None) if outside is not None else self._read_for_policy(asked)

    async def _read_large_in_thread(self, asked: ModelRequest, read: Callable[[], _Read]) -> _Read:
        """Return what `read` makes of the request's body. Large bodies are decoded in a thread, one at a time, so that
        other requests are answered meanwhile."""
        if len(asked.request.body) < _LARGE_BODY:
            return read()
        return await anyio.to_thread.run_sync(read, limiter=self._large_bodies)

    async def _caller(self, call: Call, asked: ModelRequest, *, detect: bool = True) -> Caller:
        """Find the trajectory of a call, check that the call may name its model, and read the request's headers.
        `detect`: whether the call's messages may tell the trajectory. Raises `ApiError`."""
        headers = asked.request.headers
        trajectory = await self._call_identifier.find_trajectory(
            asked.access, asked.trajectory, headers, call, detect=detect
        )
        self._gateway.router.check(call.params.model, trajectory.opened if trajectory is not None else None)
        if trajectory is not None:
            self._gateway.router.check_agents_name(call.params.model, trajectory.opened)
        return Caller(
            trajectory,
            traceparent(headers),
            headers.get(b"x-stainless-retry-count", b"0") != b"0",
            headers.get(SIDE_CALL_HEADER, b"") in (b"1", b"true"),
            _role(headers),
            asked.request.cancellation,
            prompt=asked.prompt,
        )

    async def _translated_call(
        self, asked: ModelRequest, translation: Translation, call: Call, known: Caller | None = None
    ) -> int:
        """Answer a call of `/v1/responses` or `/v1/messages` as the chat completion `call` that it was translated into.
        `known`: its caller, if that was found already. Returns the status."""
        request = asked.request
        if asked.sent is not None:
            translation.instructions = asked.sent.instructions
        if translation.continued:
            caller = await self._continued_call(translation, call, asked, known)
        else:
            caller = known or await self._caller(call, asked)
        translation.stored = caller.trajectory is not None
        if translation.left_out:
            types = ", ".join(translation.left_out)[:500]
            logger.warning("tools that only OpenAI can run were left out", types=types)
        sink = TranslatedSink(request, translation) if call.stream else None
        status, answer = await self._calls.answer(call, caller, sink)
        if status == 400 and translation.merge_system():
            merged = translation.call()
            call.body, call.fields = merged.body, merged.fields  # the same object: it holds `detected`
            self._gateway.permitted.check(call.fields)
            status, answer = await self._calls.answer(call, caller, sink)
        _check_apprentice_answered(caller, status)
        if status == 200 and not call.stream:
            await request.answer(200, msgspec.json.encode(translation.answer(msgspec.json.decode(answer))))
        if not request.started:
            await request.answer(status, error_body(asked.path, answer, status))
        return status

    async def _continued_call(
        self, translation: Translation, call: Call, asked: ModelRequest, known: Caller | None
    ) -> Caller:
        """Put the recorded answers that a call refers to into it, from the log. Return its caller: `known`, or the one
        found by what the call names, or else by its messages once they are complete."""
        # The trajectory that URL, headers, metadata or token name is found first: a call that is refused for it reads
        # no recorded answer.
        caller = known or await self._caller(call, asked, detect=False)
        async with self._gateway.api_keys.reading(asked.request.owner) as read:
            exchanges = await self._gateway.registry.exchanges_of(translation.continued, asked.access, read)
        for missing in translation.continued - exchanges.keys():
            raise unknown_reference(missing)
        whole = translation.call(exchanges)
        call.body, call.fields = whole.body, whole.fields  # the same object: it holds `detected`
        return await self._caller(call, asked) if caller.trajectory is None else caller


def _apprentice_has_run(caller: Caller, call: OutsideCall) -> bool:
    """Whether the call is of a run that an apprentice has taken over from the outside model."""
    opened = caller.trajectory.opened if caller.trajectory is not None else None
    return opened is not None and opened.asked == call.params.model != opened.model


def _check_apprentice_answered(caller: Caller, status: int) -> None:
    """Raise an `ApiError` for an error of the inference server, if an apprentice is asked: its master answers then.
    Other clients get the error as it is."""
    if status != 200 and caller.wait_s:
        raise ApiError(status, "apprentice_refused", f"the inference server answered {status}")


def _role(headers: Headers) -> str:
    """Return the agent that calls, escaped as in URLs; empty where none is named. Raises `InvalidNameError`."""
    name = decode_header(headers, ROLE_HEADER)
    return check_name(name) if name else ""
