"""Signals about runs and their calls, in stream ROLLOUTS: what training may use beside the agent's own reward."""

from __future__ import annotations

from typing import Literal

from pipeline.events.base import Event
from pipeline.events.types import Split


class SignalGiven(Event, frozen=True, kw_only=True, tag="rollout.signal"):
    """Somebody said something about a run or about one call of it, during the run or later. What it changes is decided
    by settings (`feedback`, `judge.rewards`), so it can be computed again over history under other settings."""

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
    """Where it came from, such as `api`, `dashboard`, `langfuse`, `file`."""

    def message_id(self) -> str:
        return f"{self.project}/{self.trajectory}/signal/{self.signal}"
