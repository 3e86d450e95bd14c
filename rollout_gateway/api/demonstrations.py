"""Conversations that the model did not have, as calls of a trajectory: what supervised fine-tuning trains."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec

from pipeline.events import ExchangeRecorded, TrajectoryOpened, now_us, pack_ids
from pipeline.names import parse_version, version_name
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.control_request import ControlRequest
from rollout_gateway.api.schemas import Demonstration, GroupMember
from rollout_gateway.api.tokens import token_ids
from rollout_gateway.http.errors import ApiError

_encode = msgspec.json.Encoder().encode
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
"""Recorded with a demonstration: its tokens are trained under the model's own distribution."""


@dataclass(frozen=True)
class _Turn:
    """One reply of a demonstration, recorded as a call without logprobs."""

    opened: TrajectoryOpened
    request: dict[str, Any]
    reply: dict[str, Any]
    prompt_ids: list[int]
    reply_ids: list[int]
    step: int
    traceparent: str = ""

    @property
    def request_hash(self) -> str:
        return hashlib.sha256(_encode([self.request, self.reply])).hexdigest()[:32]

    def events(self, seq: int) -> list[ExchangeRecorded]:
        """The call under the sequence number `seq`."""
        opened, now = self.opened, now_us()
        choice = {"index": 0, "message": self.reply, "finish_reason": "stop"}
        return [
            ExchangeRecorded(
                project=opened.project, trajectory=opened.trajectory, seq=seq, model=opened.model,
                policy_version=f"{opened.model}@{self.step}", step=self.step, group=opened.group,
                request=_encode(self.request), response=_encode({"object": "chat.completion", "choices": [choice]}),
                prompt_ids=pack_ids(self.prompt_ids), sampled_ids=pack_ids(self.reply_ids), logprobs=b"",
                finish_reason="stop", endpoint="demonstration", request_hash=self.request_hash, started_at=now,
                first_token_at=now,
            )
        ]  # fmt: skip


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
    if not any(message.get("role") == "assistant" for message in member.demonstration.messages):
        message = f"{where}: the demonstration has no message of the assistant, so nothing to train."
        raise ApiError(400, "invalid_body", message, param="demonstration")


async def record_demonstration(request: ControlRequest, trajectory: str, chat: Demonstration) -> None:
    """Record a conversation's replies as calls of an open trajectory: each with the prompt that the model would have
    got, in the tokens of the model's chat template. The same again, also of a completed trajectory, records nothing
    more. Raises a 400 `ApiError` for a conversation that the template can't render so."""
    gateway = request.gateway
    try:
        run = await gateway.registry.find(trajectory)
    except ApiError as error:
        if error.code == "trajectory_completed":
            return
        raise
    model, tools = run.opened.model, {"tools": chat.tools} if chat.tools else {}
    step = parse_version(gateway.policies.newest_loaded(model) or version_name(model, 0))[1]
    for i, reply in enumerate(chat.messages):
        if reply.get("role") != "assistant":
            continue
        fields: dict[str, Any] = {"messages": chat.messages[:i], **tools}
        prompt = await token_ids(request, model, fields | {"add_generation_prompt": True})
        both = {"messages": chat.messages[: i + 1], "add_generation_prompt": False}
        whole = await token_ids(request, model, fields | both)
        if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
            message = (
                f"Trajectory {trajectory!r}: the model's chat template renders another prompt once message {i} follows "
                "it, so the message can't be trained. End the conversation before it, or use another template."
            )
            raise ApiError(400, "invalid_body", message, param="demonstration")
        sent = {"model": model, **fields, **_SAMPLING}
        turn = _Turn(run.opened, sent, reply, prompt, whole[len(prompt) :], step)
        if turn.request_hash not in run.recorded.recent:
            await run.record(turn)
