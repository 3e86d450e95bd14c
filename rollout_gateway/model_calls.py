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
from rollout_gateway.dialects.prompts import OriginalFields, read_original, with_prompt
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

    http: Request
    access: Access
    path: str
    """Path of the URL, without the trajectory that it may begin with."""
    trajectory: str
    """The trajectory that the URL names; empty if it names none."""
    prompt: str = ""
    """Id of the promoted prompt that was put into the call; empty if none was."""
    original: OriginalFields | None = None
    """Fields of the body before the promoted prompt was put in; `None` if none was."""


class ModelCalls:
    """Answers model calls."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._calls, self._call_identifier = gateway, gateway.calls, gateway.call_identifier
        self._large_bodies = anyio.CapacityLimiter(1)

    async def answer(self, model_request: ModelRequest) -> int:
        """Answer a model call. Returns the status. Raises `ApiError`, `BrokerError` and `ClientGoneError`."""
        await self._put_promoted_prompt(model_request)
        call, translation = await self._read_large_in_thread(model_request, partial(self._read_call, model_request))
        if translation is not None:
            return await self._translated_call(model_request, translation, call)
        caller = await self._caller(call, model_request)
        if isinstance(call, OutsideCall):
            ask = partial(self._ask_apprentice, model_request, call, caller)
            apprentice = ask if _apprentice_has_run(caller, call) else None
            return await self._gateway.relay.answer(model_request.http, call, caller, model_request.access, apprentice)
        return await self._plain_call(model_request.http, call, caller)

    async def _plain_call(self, request: Request, call: Call, caller: Caller) -> int:
        """Answer a call of vLLM's own API. Returns the status."""
        status, answer = await self._calls.answer(call, caller, request if call.stream else None)
        _check_apprentice_answered(caller, status)
        if not request.started:
            await request.answer(status, answer)
        return status

    async def _ask_apprentice(self, model_request: ModelRequest, call: OutsideCall, caller: Caller) -> int:
        """Answer a call of an outside model by the apprentice that has its run. Returns the status.

        Raises `NotAnsweredError` if its master is to answer, because the apprentice is unsure, late or refused; and
        `ApiError`. `Relay.answer` calls it."""
        assert caller.trajectory is not None
        opened, wait_s = caller.trajectory.opened, call.tables[0].apprentice_wait_s
        try:
            policy_call, translation = await self._read_large_in_thread(
                model_request, partial(self._read_for_policy, model_request)
            )
            policy_call.params.model = opened.model
            policy_call.asks_whole = opened.min_logprob is not None and policy_call.stream
            policy_call.detected = call.detected
            caller = replace(caller, wait_s=wait_s, min_logprob=opened.min_logprob)
            if translation is not None:
                return await self._translated_call(model_request, translation, policy_call, caller)
            return await self._plain_call(model_request.http, policy_call, caller)
        except (ApiError, UnsureError) as error:
            final = isinstance(error, ApiError) and (not wait_s or error.code in _NOT_FOR_MASTER)
            if model_request.http.started or final:
                raise
            raise NotAnsweredError(f"{opened.pinned or opened.model}: {error}") from error

    async def _put_promoted_prompt(self, model_request: ModelRequest) -> None:
        """Replace the agent's system prompt in the request's body by a promoted one, if a decision in force has one for
        the call."""
        if not self._gateway.router.has_prompts():
            return
        request, access = model_request.http, model_request.access
        original = await self._read_large_in_thread(model_request, partial(read_original, request.body))
        metadata = None if model_request.path in _TRANSLATIONS else original.metadata  # its `metadata` names no run
        run = access.trajectory or named_run(model_request.trajectory, request.headers, metadata).trajectory
        opening = await self._gateway.registry.opening(run) if run else None
        if opening is not None and not (access.trajectory or access.owns(opening.owner)):
            return  # the call is refused, as for a run that does not exist
        decision = self._gateway.router.prompt_for(original.model, opening)
        if decision is None:
            return
        put = partial(with_prompt, model_request.path, request.body, decision.replaces, decision.prompt)
        if (body := await self._read_large_in_thread(model_request, put)) is not None:
            request.body, model_request.prompt, model_request.original = body, decision.prompt_id, original

    def _read_for_policy(self, model_request: ModelRequest) -> tuple[Call, Translation | None]:
        """Read and check the body of a call that a policy answers. Returns as `_read_call`. Raises `ApiError`."""
        path, body = model_request.path, model_request.http.body
        translation = _TRANSLATIONS[path](body) if path in _TRANSLATIONS else None
        call = translation.call() if translation is not None else _READERS[path](body)
        self._gateway.permitted.check(call.fields)
        return call, translation

    def _read_call(self, model_request: ModelRequest) -> tuple[Call, Translation | None]:
        """Read and check the body of a model call. Returns the call, and its translation if it is of an API that is
        translated."""
        outside = self._gateway.relay.read(model_request.path, model_request.http.body)
        return (outside, None) if outside is not None else self._read_for_policy(model_request)

    async def _read_large_in_thread(self, model_request: ModelRequest, read: Callable[[], _Read]) -> _Read:
        """Return what `read` makes of the request's body. Large bodies are decoded in a thread, one at a time, so that
        other requests are answered meanwhile."""
        if len(model_request.http.body) < _LARGE_BODY:
            return read()
        return await anyio.to_thread.run_sync(read, limiter=self._large_bodies)

    async def _caller(self, call: Call, model_request: ModelRequest, *, detect: bool = True) -> Caller:
        """Find the trajectory of a call, check that the call may name its model, and read the request's headers.
        `detect`: whether the call's messages may tell the trajectory. Raises `ApiError`."""
        headers = model_request.http.headers
        trajectory = await self._call_identifier.find_trajectory(
            model_request.access, model_request.trajectory, headers, call, detect=detect
        )
        self._gateway.router.check(call.params.model, trajectory.opened if trajectory is not None else None)
        if trajectory is not None:
            self._gateway.router.check_agents_name(call.params.model, trajectory.opened)
        return Caller(
            trajectory,
            traceparent(headers),
            headers.get(b"x-stainless-retry-count", b"0") != b"0",
            headers.get(SIDE_CALL_HEADER, b"") in (b"1", b"true"),
            _agent_role(headers),
            model_request.http.cancellation,
            prompt=model_request.prompt,
        )

    async def _translated_call(
        self, model_request: ModelRequest, translation: Translation, call: Call, known_caller: Caller | None = None
    ) -> int:
        """Answer a call of `/v1/responses` or `/v1/messages` as the chat completion `call` that it was translated into.
        `known_caller`: its caller, if that was found already. Returns the status."""
        request = model_request.http
        if model_request.original is not None:
            translation.instructions = model_request.original.instructions
        if translation.referenced_ids:
            caller = await self._add_referenced_answers(translation, call, model_request, known_caller)
        else:
            caller = known_caller or await self._caller(call, model_request)
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
            await request.answer(status, error_body(model_request.path, answer, status))
        return status

    async def _add_referenced_answers(
        self, translation: Translation, call: Call, model_request: ModelRequest, known_caller: Caller | None
    ) -> Caller:
        """Put the recorded answers that a call refers to into its messages, from the log. Returns the call's caller:
        `known_caller`, or the one found by what the call names, or else by its messages once they are complete."""
        # The trajectory that URL, headers, metadata or token name is found first: a call that is refused for it reads
        # no recorded answer.
        caller = known_caller or await self._caller(call, model_request, detect=False)
        async with self._gateway.api_keys.reading(model_request.http.owner) as count_bytes:
            exchanges = await self._gateway.registry.exchanges_of(
                translation.referenced_ids, model_request.access, count_bytes
            )
        for missing in translation.referenced_ids - exchanges.keys():
            raise unknown_reference(missing)
        whole = translation.call(exchanges)
        call.body, call.fields = whole.body, whole.fields  # the same object: it holds `detected`
        return await self._caller(call, model_request) if caller.trajectory is None else caller


def _apprentice_has_run(caller: Caller, call: OutsideCall) -> bool:
    """Whether the call is of a run that an apprentice has taken over from the outside model."""
    opened = caller.trajectory.opened if caller.trajectory is not None else None
    return opened is not None and opened.asked == call.params.model != opened.model


def _check_apprentice_answered(caller: Caller, status: int) -> None:
    """Raise an `ApiError` for an error status of the inference server if the caller has a `wait_s`: then an apprentice
    was asked, and its master answers instead. Other clients get the server's error as it is."""
    if status != 200 and caller.wait_s:
        raise ApiError(status, "apprentice_refused", f"the inference server answered {status}")


def _agent_role(headers: Headers) -> str:
    """Return the name of the agent that calls, which the header `ROLE_HEADER` holds percent-encoded; empty if it is
    missing. Raises `InvalidNameError`."""
    name = decode_header(headers, ROLE_HEADER)
    return check_name(name) if name else ""
