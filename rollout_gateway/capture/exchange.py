"""The parties of one model call: its caller, the client's end of a stream, the server's answer, and what the log gets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pipeline.events import ExchangeRecorded, now_us
from pipeline.names import parse_version
from rollout_gateway.capture.runs import Trajectory
from rollout_gateway.dialects.calls import Answer, Call, SampledChoice
from rollout_gateway.dialects.endpoints import Dialect
from rollout_gateway.http.upstream import UpstreamReply
from rollout_gateway.serving.blame import Trial
from rollout_gateway.serving.replicas import Lease

Status = Literal["complete", "cancelled", "failed"]


@dataclass(eq=False, slots=True)
class Caller:
    """Who calls and whether it still listens."""

    trajectory: Trajectory | None = None
    traceparent: str = ""
    retry: bool = False
    """The client says that it tried before."""
    side_call: bool = False
    gone: bool = False
    cut: bool = False
    """The gateway is stopping and waits for this call no longer."""
    _on_gone: Callable[[], None] | None = None

    def calling(self) -> AbstractContextManager[None]:
        """Count the call with its trajectory, where there is one. Raises a 409 `ApiError` where that is being completed."""
        return self.trajectory.calling() if self.trajectory is not None else nullcontext()

    def leave(self) -> None:
        """The client closed its connection."""
        self.gone = True
        if self._on_gone is not None:
            self._on_gone()

    def cut_off(self) -> None:
        """End the call now: it is answered with an error."""
        self.cut = True
        if self._on_gone is not None:
            self._on_gone()

    def has_left(self) -> bool:
        return self.gone

    def was_cut(self) -> bool:
        return self.cut

    def when_gone(self, action: Callable[[], None] | None) -> None:
        """Call `action` when the client leaves or the call is cut off; at once if that has happened."""
        self._on_gone = action
        if action is not None and (self.gone or self.cut):
            action()


class StreamSink(Protocol):
    """The client of a streamed call."""

    def start(self, flow: Callable[[bool], None]) -> None:
        """The answer begins; `flow` is to be called with true where the client is too slow, with false when it may go on."""

    @property
    def write_chunks(self) -> Callable[[bytes], None] | None:
        """The same as `write` for what is in HTTP's chunked coding already; none where that is not what it listens to."""

    def write(self, data: bytes) -> None:
        """Whole server-sent events."""

    def end(self) -> None:
        """The answer has ended."""


@dataclass(eq=False, slots=True)
class Attempt:
    """A call that an inference server answers."""

    lease: Lease
    reply: UpstreamReply
    body: bytes
    """The whole reply, unless it is being streamed."""
    started_at: int
    incarnation: str = ""
    """The life of the server that was asked."""
    trial: Trial | None = None
    """Set for a request that was in flight at a death of its server before."""

    @property
    def status(self) -> int:
        return self.reply.status


@dataclass(eq=False, slots=True)
class Exchange:
    """What the log gets of one call."""

    dialect: Dialect
    call: Call
    caller: Caller
    trajectory: Trajectory
    version: str = ""
    replica: str = ""
    started_at: int = field(default_factory=now_us)
    first_token_at: int = 0
    _hash: str = ""

    def hash(self) -> str:
        """Of the request."""
        if not self._hash:
            self._hash = self.call.hash()
        return self._hash

    def sent(self, break_off: Callable[[], None]) -> None:
        """The request is on its way: do what need not be done before."""
        self.caller.when_gone(break_off)
        self.hash()

    def take(self, attempt: Attempt) -> None:
        self.version, self.replica = attempt.lease.version, attempt.lease.replica.name
        self.started_at = attempt.started_at

    def events(self, answer: Answer, seq: int, status: Status) -> list[ExchangeRecorded]:
        choices = answer.choices or [SampledChoice(0)]
        return [self._event(answer, choice, seq, status) for choice in choices]

    def _event(self, answer: Answer, choice: SampledChoice, seq: int, status: Status) -> ExchangeRecorded:
        opened = self.trajectory.opened
        return ExchangeRecorded(
            project=opened.project,
            trajectory=opened.trajectory,
            seq=seq,
            choice=choice.index,
            model=opened.model,
            policy_version=self.version,
            step=parse_version(self.version)[1],
            group=opened.group,
            request=self.call.body,
            response=answer.client_body(choice) if answer.fields else b"{}",
            prompt_ids=choice.prompt_ids or answer.prompt_ids,
            sampled_ids=choice.ids,
            logprobs=choice.logprobs,
            forced=self.call.forced(choice),
            finish_reason=choice.finish_reason,
            status=status,
            side_call=self.caller.side_call,
            endpoint=self.call.endpoint,
            streamed=self.call.stream,
            request_hash=self.hash(),
            replica=self.replica,
            started_at=self.started_at,
            first_token_at=self.first_token_at,
        )
