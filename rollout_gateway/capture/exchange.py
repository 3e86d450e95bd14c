"""One model call on its way: its caller, its request, its answer, and the events that record it.

`model_calls` makes the `Caller` from the request's headers. `handler` makes an `Exchange` of the call, fills it while
the call is dispatched and answered, and records it. `outside.relay` extends it for providers' models."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from pipeline.events import ExchangeRecorded, now_us
from pipeline.names import parse_version
from rollout_gateway.capture.trajectory import Trajectory
from rollout_gateway.dialects.calls import Answer, Call, SampledChoice
from rollout_gateway.http.cancellation import Cancellation
from rollout_gateway.serving.replicas import Lease

Status = Literal["complete", "cancelled", "failed", "unsure"]
"""How a call ended, as its event says it. `cancelled`: its client left. `unsure`: its answer was not shown."""

_NO_ANSWER = Answer({}, b"", [])


@dataclass(eq=False, slots=True)
class Caller:
    """Who makes a model call, and what the headers of the request say about it."""

    trajectory: Trajectory | None = None
    """`None`: the call belongs to no run, and is answered without being recorded."""
    traceparent: str = ""
    """W3C trace context; empty if the request has none."""
    is_retry: bool = False
    """The client marked this call as a retry."""
    side_call: bool = False
    """The client marked it as no part of the task: it is recorded and never trained."""
    role: str = ""
    """The agent of the run that calls, in a run of several."""
    cancellation: Cancellation = field(default_factory=Cancellation)
    """Cancels the call while it waits for an inference server."""
    wait_s: float = 0.0
    """Seconds until an apprentice's answer has to come or its stream to begin; then its master answers. 0: no limit but
    that of the inference server."""
    min_logprob: float | None = None
    """Least mean logprob of an answer that is shown; `None`: any is."""
    prompt: str = ""
    """Id of the promoted prompt that was put into the call."""


@dataclass(eq=False)
class Exchange:
    """A model call, from its request to its record on the log."""

    call: Call
    caller: Caller
    answer_id: str = ""
    """Id that the answer will have, without its prefix. Empty: the inference server chooses it."""
    version: str = ""
    """Exact policy version of the call; empty until the call was sent to a server."""
    replica: str = ""
    started_at: int = field(default_factory=now_us)
    first_token_at: int = 0
    answer: Answer = _NO_ANSWER
    status: Status = "failed"
    seq: int = -1
    """Number of the call in its run, once it is recorded."""

    @property
    def captured(self) -> bool:
        """Whether the call is recorded: it belongs to a run."""
        return self.caller.trajectory is not None

    @property
    def recorded_in(self) -> Trajectory:
        """The trajectory of a captured call."""
        assert self.caller.trajectory is not None
        return self.caller.trajectory

    @cached_property
    def request_hash(self) -> str:
        """SHA-256 of the endpoint and the request's fields."""
        return self.call.hash()

    def mark_sent(self, lease: Lease, started_at: int) -> None:
        """Note that the request was sent, when (Unix microseconds), and to which server and version."""
        self.version, self.replica, self.started_at = lease.version, lease.replica.name, started_at

    def events(self) -> list[ExchangeRecorded]:
        """Return one event for each choice, for `Trajectory.record`. A call without an answer has one event, too."""
        return [self._event(choice) for choice in self.answer.choices or [SampledChoice(0)]]

    def _event(self, choice: SampledChoice) -> ExchangeRecorded:
        """Return the event of one choice. `Trajectory.record` sets its `seq`."""
        opened, answer, call = self.recorded_in.opened, self.answer, self.call
        return ExchangeRecorded(
            project=opened.project,
            trajectory=opened.trajectory,
            seq=0,
            choice=choice.index,
            model=opened.model,
            policy_version=self.version,
            group=opened.group,
            request=call.body,
            response=answer.client_body(choice) if answer.fields else b"{}",
            finish_reason=choice.finish_reason,
            status=self.status,
            side_call=self.caller.side_call,
            role=self.caller.role,
            prompt=self.caller.prompt,
            endpoint=call.endpoint,
            streamed=call.stream,
            request_hash=self.request_hash,
            replica=self.replica,
            started_at=self.started_at,
            first_token_at=self.first_token_at,
            **self._own_fields(choice),
        )

    def _own_fields(self, choice: SampledChoice) -> dict[str, Any]:
        """Return the fields of a choice's event that depend on who answered, a policy here: its step and its tokens."""
        return {
            "step": parse_version(self.version)[1],
            "prompt_ids": choice.prompt_ids or self.answer.prompt_ids,
            "sampled_ids": choice.ids,
            "logprobs": choice.logprobs,
            "forced": self.call.forced_mask(choice),
        }
