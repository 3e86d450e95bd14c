"""Demonstrations: conversations that the model did not have, recorded as calls of a trajectory. Supervised fine-tuning
trains the model on their replies. They come with the request that completes their group (`groups`)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from pipeline.chat.demonstrations import UntrainableReplyError, demonstrated_replies
from pipeline.events import ExchangeRecorded, now_us, pack_ids
from pipeline.names import parse_version, version_name
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.gateway import ControlRequest, Gateway
from rollout_gateway.api.schemas import GroupMember
from rollout_gateway.api.tokens import token_ids
from rollout_gateway.http.errors import ApiError, invalid_body

_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
"""Recorded with a demonstration: its tokens are trained under the model's own distribution."""


def check_demonstration(member: GroupMember, access: Access) -> None:
    """Raise an `ApiError`: 403 for a caller that is no operator, 400 for a conversation without a reply."""
    assert member.demonstration is not None
    if not access.operator:
        message = "A `demonstration` needs an operator's key: it decides what the model becomes."
        raise ApiError(403, "wrong_role", message, param="demonstration")
    where = f"Trajectory {member.id!r}"
    if member.exchanges:
        raise invalid_body(f"{where}: give `demonstration` or `exchanges`, not both.", "demonstration")
    if not any(demonstrated_replies(member.demonstration.messages)):
        message = f"{where}: the demonstration has no message of the assistant after its first, so nothing to train."
        raise invalid_body(message, "demonstration")


async def demonstrated_calls(
    request: ControlRequest, model: str, group: str, member: GroupMember
) -> list[ExchangeRecorded]:
    """Return the replies of a member's demonstration as calls of its trajectory: each with the token ids of the prompt
    that the model would have got, by its chat template, and of the reply, without logprobs. Returns none if
    the trajectory is completed already, as by a request that the client repeats. `member` has a demonstration.

    Raises an `ApiError`: 400 for a conversation that the template can't render so, 502 or 503 where no inference server
    answers."""
    gateway, chat = request.gateway, member.demonstration
    assert chat is not None
    if (opened := await gateway.registry.opening(member.id)) is not None:
        if await gateway.registry.log.completion(opened) is not None:
            return []
        model = opened.model
    gateway.router.refuse_outside(model)
    # No version sampled the replies, but a call has one: the model's newest.
    version = gateway.policies.newest_loaded_anywhere(model) or version_name(model, 0)
    calls = []
    for reply in demonstrated_replies(chat.messages, chat.tools):
        prompt = await token_ids(request, model, reply.prompt)
        whole = await token_ids(request, model, reply.whole)
        try:
            reply_ids = reply.reply_ids(prompt, whole)
        except UntrainableReplyError as error:
            raise invalid_body(f"Trajectory {member.id!r}: {error}.", "demonstration") from error
        recorded_request = {"model": model, **reply.request, **_SAMPLING}
        choice = {"index": 0, "message": reply.message, "finish_reason": "stop"}
        now = now_us()
        calls.append(
            ExchangeRecorded(
                project=gateway.project,
                trajectory=member.id,
                seq=0,  # the trajectory sets it as it records the call
                model=model,
                policy_version=version,
                step=parse_version(version)[1],
                group=group,
                request=msgspec.json.encode(recorded_request),
                response=msgspec.json.encode({"object": "chat.completion", "choices": [choice]}),
                prompt_ids=pack_ids(prompt),
                sampled_ids=pack_ids(reply_ids),
                logprobs=b"",
                finish_reason="stop",
                endpoint="demonstration",
                request_hash=hashlib.sha256(msgspec.json.encode([recorded_request, reply.message])).hexdigest()[:32],
                started_at=now,
                first_token_at=now,
            )
        )
    return calls


async def record_demonstration(gateway: Gateway, trajectory: str, calls: Sequence[ExchangeRecorded]) -> None:
    """Record the calls of a demonstration in its open trajectory. Those that are recorded already are left out, as the
    request may be a client's retry."""
    if not calls:
        return
    run = await gateway.registry.find(trajectory)
    await run.refresh()
    recorded = {call.request_hash async for call in run.log.calls(run.id)}
    for call in calls:
        if call.request_hash not in recorded:
            await run.record([call])
