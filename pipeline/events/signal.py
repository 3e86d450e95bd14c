"""Signals about runs and their calls, in stream ROLLOUTS: what training may use beside the agent's own reward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pipeline.events.base import Event
from pipeline.events.rollout import ExchangeRecorded
from pipeline.events.types import Logprobs, Split, TokenIds
from pipeline.names import is_outside

OWN_REWARD = "reward"
"""Name of a number about a call that is that call's reward if the run's owner gave it and no reward of kind `feedback`
has the name."""


class SignalGiven(Event, frozen=True, kw_only=True, tag="rollout.signal"):
    """Feedback on a run or on one of its calls, given during the run or later. Settings (`feedback`, `judge.rewards`)
    decide its effect, so the effect can be computed again over the history under other settings."""

    subject_fields = ("project", "model", "group", "trajectory", "signal")
    unique_subject = True

    signal: str
    """Id of the signal: the name of the API key that gave it and the id that the caller chose, or a fresh one. The same
    id is the same signal."""
    trajectory: str
    model: str
    group: str
    """The run's group, as in `group.scored`."""
    split: Split = "train"
    """Split of the run."""
    call: int = -1
    """The call that it is about: `seq` of the exchange. -1: the whole run."""
    name: str = "feedback"
    """Name by which settings refer to it, such as that of a reward of kind `feedback`."""
    kind: Literal["number", "text", "correction"] = "number"
    """`number`: `value` grades the run or call. `text`: words about it, such as a user's objection. `correction`: the
    answer that the call should have given."""
    value: float | None = None
    """The number; a thumb is 1 or -1, a place in a ranking of n runs goes from 1 (best) to 0."""
    text: str = ""
    """The words or the corrected answer; a comment where `kind` is `number`."""
    by: str = ""
    """Name of the API key that gave it; empty where the installation has no keys."""
    source: str = ""
    """Where it came from, such as `api`, `dashboard`, `healing`. Where `corrected_by` named a run: the version
    that gave its last answer."""
    copied_from: str = ""
    """The run that `corrected_by` named."""

    @property
    def version(self) -> str:
        """`outside:<name>` if an outside model wrote the text, else empty."""
        return next((v for v in (self.source, self.by) if is_outside(v)), "")


class TeacherAnswered(Event, frozen=True, kw_only=True, tag="rollout.teacher"):
    """The logprobs, at temperature 1, that a teacher from outside (`[teacher]`) gives to the sampled tokens of a run.
    The arrays hold the calls one after the other, by `seq` and `choice`, without side calls."""

    subject_fields = ("project", "trajectory", "teacher")
    unique_subject = True

    trajectory: str
    teacher: str
    """The teacher's model, as configured."""
    logprobs: Logprobs
    """Of each sampled token."""
    top_k: int = 0
    """Number of most probable tokens that are known at each sampled token."""
    top_ids: TokenIds = b""
    """Their ids, `top_k` for each sampled token."""
    top_logprobs: Logprobs = b""
    requests: int = 0
    """Calls of the teacher: one for each conversation of the run."""
    tokens: int = 0
    """Tokens that the teacher read."""
    latency_s: float = 0.0

    @staticmethod
    def calls_of(exchanges: Iterable[ExchangeRecorded]) -> list[ExchangeRecorded]:
        """Return the calls of a run that an answer is about, in the order of its arrays."""
        unique = {(e.seq, e.choice): e for e in exchanges if not e.side_call and e.prompt_ids and e.sampled_ids}
        return [unique[key] for key in sorted(unique)]
