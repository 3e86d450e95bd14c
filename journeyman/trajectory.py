"""One agent run, as agent code holds it, and what can be said of it when it is opened and completed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

Outcome = Literal["scored", "no_result", "masked"]


class OpenOptions(TypedDict, total=False):
    """What `open` and `trajectory` take besides the model. docs/gateway.md describes each."""

    id: str
    """Name of the trajectory. The client draws one if it is left out."""
    group: str
    """Trajectories of one group are compared with each other. A trajectory without a group gets one of its own."""
    group_size: int
    """How many trajectories the group has; the judge waits for that many."""
    attempt: int
    """Number of the attempt within the group, from 1."""
    task: str
    """What the group is about, as the judge reads it."""
    split: Literal["train", "val"]
    """`val` trajectories are kept and never trained. Default: `train`."""
    metadata: dict[str, Any]
    pinned: str
    """A policy version that answers every call of the trajectory, such as `support@12`."""
    key_completes: bool
    """Whether the trajectory's own key may complete it, and so grade it. Default: false."""


class CompleteOptions(TypedDict, total=False):
    """How a trajectory ended, for `complete`."""

    reward: float | None
    rewards: dict[str, float]
    metrics: dict[str, float]
    metadata: dict[str, Any]
    outcome: Outcome


@dataclass
class Trajectory:
    """One agent run. Point any OpenAI client at `base_url` with `api_key`; then say how it went."""

    id: str
    model: str
    group: str
    base_url: str
    api_key: str
    reward: float | None = None
    """What the run was worth. `None` lets the judge assign the reward."""
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    outcome: Outcome = "scored"
    """`no_result`: infrastructure failed, so the run says nothing of the policy; `masked`: keep it, do not train."""

    @property
    def openai(self) -> dict[str, Any]:
        """Arguments for `openai.OpenAI(**run.openai)`; retries outlast a gateway that restarts."""
        return {"base_url": self.base_url, "api_key": self.api_key, "max_retries": 8}

    def result(self) -> CompleteOptions:
        """Return how the run went, as `complete` takes it."""
        return {
            "reward": self.reward,
            "rewards": self.rewards,
            "metrics": self.metrics,
            "metadata": self.metadata,
            "outcome": self.outcome,
        }
