"""Events of groups and of their judges, in stream GROUPS."""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeline.events.base import Event
from pipeline.events.types import Outcome, Split


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What a judge said of one trajectory."""

    trajectory: str
    score: float
    """0..1."""
    explanation: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one judge call said of one group."""

    judge_model: str
    """Model that judged; `agent` where the agents' own rewards were passed through."""
    rubric_hash: str = ""
    rubric: str = ""
    """The rubric's name."""
    scores: tuple[Score, ...]
    order: tuple[str, ...] = ()
    """Trajectory ids in the order in which the judge saw them."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    latency_s: float = 0.0
    attempts: int = 1
    """Calls made until the reply could be read."""
    left_out: int = 0
    """Bytes of the trajectories that did not fit into the prompt (`judge.context_tokens`), so that the judge did not see them."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory's place in a scored group."""

    trajectory: str
    reward: float
    """The group's final reward of the trajectory, after composition."""
    outcome: Outcome = "scored"
    split: Split = "train"
    components: dict[str, float] = {}
    """Every reward that went into `reward`, by name."""
    exchanges: int = 0
    first_step: int = 0
    last_step: int = 0
    completed_seq: int = 0
    """Stream sequence of the member's `rollout.completed`."""


class GroupScored(Event, frozen=True, kw_only=True, tag="group.scored"):
    """The trajectories of one task, with their rewards: the unit of GRPO. One per group and judge configuration."""

    subject_fields = ("project", "model", "group", "judge", "branch")
    last_subject_field = ("split", "train")
    unique_subject = True

    group: str
    model: str
    task: str = ""
    judge: str
    """Hash of the judge configuration that scored it."""
    members: tuple[Member, ...]
    verdicts: tuple[Verdict, ...] = ()
    branch: str = "main"
    """The line of history it belongs to; replays live on branches of their own."""
    origin: str = ""
    """For a replayed group: `<branch>/<stream sequence>` of what it was made from."""
    offline: bool = False
    """True where the trajectories were not sampled for this training run."""
    closed_by: Literal["size", "timeout", "replay"] = "size"
    split: Split = "train"
    """Trajectories of different splits under one group id are groups of their own."""

    def message_id(self) -> str:
        ended = "scored" if self.split == "train" else f"scored/{self.split}"
        return f"{self.project}/{self.model}/{self.branch}/{self.group}/{self.judge}/{ended}"


class GroupDiscarded(Event, frozen=True, kw_only=True, tag="group.discarded"):
    """Experience that will not train, and why: nothing is dropped in silence."""

    subject_fields = ("project", "model", "group", "branch")

    group: str
    model: str
    trajectories: tuple[str, ...]
    reason: Literal[
        "too_small",
        "late",
        "unscored",
        "no_variance",
        "stale",
        "history_gone",
        "over_budget",
        "validation",
        "repeated",
        "too_large",
    ]
    """`too_large`: a sequence of these trajectories does not fit into the trainer's memory even alone. The rest of the group was
    trained, in `version`."""
    by: str
    """The service that decided."""
    detail: str = ""
    version: str = ""
    """Policy version at which it was decided, where that matters."""
    duration_s: float = 0.0
    """How long the longest of the trajectories took, to see whether long tasks starve."""
    branch: str = "main"
    split: Split = "train"

    def message_id(self) -> str:
        first = self.trajectories[0] if self.trajectories else ""
        return f"{self.project}/{self.model}/{self.branch}/{self.group}/{first}/{self.reason}/{self.by}"


class JudgeMeasured(Event, frozen=True, kw_only=True, tag="group.measured"):
    """What a judge found out about itself: its bias and agreement with itself, or with groups of known rewards."""

    subject_fields = ("project", "ruler", "kind")

    kind: Literal["groups", "anchors"]
    """`groups`: over all groups that this judge process scored so far; `anchors`: one run over the anchor groups."""
    judge: str
    """Hash of the judge configuration, as in `group.scored`."""
    model: str
    """The judge model as configured."""
    ruler: str
    """Name of the reward whose judge it is; `default` where rewards are not composed."""
    rubric: str = ""
    rubric_hash: str = ""
    groups: int = 0
    """How many groups it rests on."""
    failed: int = 0
    """Judgings (or anchor groups) that gave no scores."""
    calls: int = 0
    asked_again: int = 0
    """Calls that were needed because a reply could not be read."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    self_agreement: float | None = None
    """Share of pairs that two judgings of a group put into the same order."""
    position_bias: float | None = None
    """What the first place in the list is worth over the others, in points of score, before it is taken out."""
    kendall_tau: float | None = None
    """Agreement with the known rewards of the anchors."""
    pairwise_accuracy: float | None = None
    sign_flips: float | None = None
    """Share of anchor trajectories whose advantage has the wrong sign."""
    alarm: bool = False
    """The judge has left the bound `judge.anchors.min_tau`."""

    def message_id(self) -> str:
        return f"{self.project}/{self.ruler}/measured/{self.kind}/{self.judge}/{self.at}"
