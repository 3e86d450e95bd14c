"""Conversations that the model did not have, as calls of a trajectory: what supervised fine-tuning trains."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from pipeline.chat.demonstrations import UntrainableReplyError, demonstrated_replies
from pipeline.events import ExchangeRecorded, TrajectoryOpened, now_us, pack_ids
from pipeline.names import parse_version, version_name
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.control_request import ControlRequest
from rollout_gateway.api.gateway import Gateway
from rollout_gateway.api.schemas import GroupMember
from rollout_gateway.api.tokens import token_ids
from rollout_gateway.http.errors import ApiError

_encode = msgspec.json.Encoder().encode
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
"""Recorded with a demonstration: its tokens are trained under the model's own distribution."""


class DemonstratedTurn(NamedTuple):
    """One reply of a demonstration."""

    request: dict[str, Any]
    reply: dict[str, Any]
    prompt_ids: list[int]
    reply_ids: list[int]
    step: int
    """Of the version that is served now."""

    @property
    def request_hash(self) -> str:
        return hashlib.sha256(_encode([self.request, self.reply])).hexdigest()[:32]


def _events(opened: TrajectoryOpened, turn: DemonstratedTurn, seq: int) -> list[ExchangeRecorded]:
    """A turn as a call without logprobs, under the sequence number `seq`."""
    now = now_us()
    choice = {"index": 0, "message": turn.reply, "finish_reason": "stop"}
    return [
        ExchangeRecorded(
            project=opened.project,
            trajectory=opened.trajectory,
            seq=seq,
            model=opened.model,
            policy_version=f"{opened.model}@{turn.step}",
            step=turn.step,
            group=opened.group,
            request=_encode(turn.request),
            response=_encode({"object": "chat.completion", "choices": [choice]}),
            prompt_ids=pack_ids(turn.prompt_ids),
            sampled_ids=pack_ids(turn.reply_ids),
            logprobs=b"",
            finish_reason="stop",
            endpoint="demonstration",
            request_hash=turn.request_hash,
            started_at=now,
            first_token_at=now,
        )
    ]


def check_demonstration(member: GroupMember, access: Access) -> None:
    """Raise an `ApiError`: 403 for a caller that is no operator, 400 for a conversation without a reply."""
    assert member.demonstration is not None
    if not access.operator:
        message = "A `demonstration` needs an operator's key: it decides what the model becomes."
        raise ApiError(403, "wrong_role", message, param="demonstration")
    where = f"Trajectory {member.id!r}"
    if member.exchanges:
        message = f"{where}: give `demonstration` or `exchanges`, not both."
        raise ApiError(400, "invalid_body", message, param="demonstration")
    if not any(demonstrated_replies(member.demonstration.messages)):
        message = f"{where}: the demonstration has no message of the assistant after its first, so nothing to train."
        raise ApiError(400, "invalid_body", message, param="demonstration")


async def demonstrated_turns(request: ControlRequest, model: str, member: GroupMember) -> list[DemonstratedTurn]:
    """A conversation's replies, each with the prompt that the model would have got, in the tokens of the model's chat
    template. A completed trajectory, as a retry names it, has none to record. Raises an `ApiError`: 400 for a
    conversation that the template can't render so, 502 or 503 where no inference server answers."""
    gateway, chat = request.gateway, member.demonstration
    assert chat is not None
    if (opened := await gateway.registry.opening(member.id)) is not None:
        if await gateway.registry.log.completion(opened) is not None:
            return []
        model = opened.model
    gateway.router.refuse_outside(model)
    step = parse_version(gateway.policies.newest_loaded(model) or version_name(model, 0))[1]
    turns = []
    for reply in demonstrated_replies(chat.messages, chat.tools):
        prompt = await token_ids(request, model, reply.prompt)
        whole = await token_ids(request, model, reply.whole)
        try:
            ids = reply.reply_ids(prompt, whole)
        except UntrainableReplyError as error:
            message = f"Trajectory {member.id!r}: {error}."
            raise ApiError(400, "invalid_body", message, param="demonstration") from error
        sent = {"model": model, **reply.request, **_SAMPLING}
        turns.append(DemonstratedTurn(sent, reply.message, prompt, ids, step))
    return turns


async def record_demonstration(gateway: Gateway, trajectory: str, turns: Sequence[DemonstratedTurn]) -> None:
    """Record the replies as calls of an open trajectory. The same again records nothing more."""
    if not turns:
        return
    run = await gateway.registry.find(trajectory)
    await run.refresh()
    done = {call.request_hash async for call in run.log.calls(run.id)}
    for turn in turns:
        if turn.request_hash not in done:
            await run.record(partial(_events, run.opened, turn))
