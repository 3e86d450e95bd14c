"""Events of groups and of their judges, in stream GROUPS.

A *group* is several runs of one task, whose rewards are compared with each other. The judge publishes it as *scored*
with a reward for each run; a group that can't train is *discarded*, with the reason. A *verdict* is one answer of a
judge model."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pipeline.events.base import Event
from pipeline.events.rollout import TrainingBatch
from pipeline.events.types import Micros, Outcome, Split


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A judge's score of one trajectory."""

    trajectory: str
    score: float
    """Score from 0 to 1; of a call -1, 0 or 1."""
    explanation: str = ""
    call: int = -1
    """`seq` of the call that the judge of kind `next_state` scored. -1: the whole run."""
    hint: str = ""
    """What the call should have done, according to that judge."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one pass of a judge over one group, or of one vote on calls of one run."""

    judge_model: str
    """Model that judged. `agent`: the agents' own rewards were used."""
    rubric_hash: str = ""
    rubric: str = ""
    """Name of the rubric."""
    scores: tuple[Score, ...]
    order: tuple[str, ...] = ()
    """Trajectory ids in the order in which the judge saw them."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    """Cost of the pass. The first verdict of a group also holds cost, tokens and calls of passes that failed."""
    latency_s: float = 0.0
    attempts: int = 1
    """Calls until a reply could be read."""
    left_out: int = 0
    """Bytes of the trajectories that were cut, because the prompt may not exceed `judge.context_tokens`."""


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """A text that says what a call should have done, from a user, another person or the judge of kind `next_state`."""

    call: int
    """`seq` of the call; -1: the run's first call."""
    text: str
    kind: Literal["text", "correction"] = "text"
    """`correction`: the answer that the call should have given."""
    by: str = ""
    """Name of the API key that gave it. Empty: the judge of kind `next_state`."""
    version: str = ""
    """`outside:<name>` where an outside model wrote the text: it teaches only where the model `may_train`."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory in a scored group."""

    trajectory: str
    reward: float
    """Final reward of the trajectory, after composition."""
    outcome: Outcome = "scored"
    split: Split = "train"
    components: dict[str, float] = {}
    """The rewards that `reward` is composed of, by name."""
    exchanges: int = 0
    first_step: int = 0
    last_step: int = 0
    completed_seq: int = 0
    """Stream sequence of the member's `rollout.completed`."""
    metrics: dict[str, float] = {}
    """The agent's metrics of the run. Checkpoints hold their means as `run/<name>`."""
    call_rewards: dict[str, float] = {}
    """Rewards of single calls, by `seq` of the call as text, beside `reward`, which is the run's."""
    hints: tuple[Hint, ...] = ()
    """What calls of the run should have done, for hindsight distillation."""
    teacher: str = ""
    """The teacher from outside whose answer about the run is on the log (`rollout.teacher`); empty: there is none."""
    graded_by: tuple[str, ...] = ()
    """Names of the API keys whose feedback is a part of `reward` or `call_rewards`; `feedback.max_share` limits their
    share of a step."""
    graded: Literal["run", "calls"] = "run"
    """`calls`: nothing judged the run as a whole. `reward` is 0, and a call trains only if it has a reward or a hint,
    or a later reward is credited to it."""


class GroupScored(Event, frozen=True, kw_only=True, tag="group.scored"):
    """The trajectories of one task, with their rewards: the unit of GRPO. One per group, verdict set and branch."""

    subject_fields = ("project", "model", "group", "judge", "branch")
    last_subject_field = ("split", "train")
    unique_subject = True

    group: str
    model: str
    task: str = ""
    judge: str
    """Verdict set: the name given to `journeywork rejudge --verdicts`, else the hash of the judge configuration."""
    members: tuple[Member, ...]
    verdicts: tuple[Verdict, ...] = ()
    branch: str = "main"
    """Branch of the log. Replays and rejudging write to branches of their own, `rejudge --branch main` to `main`."""
    origin: str = ""
    """For a replayed group: `<branch>/<stream sequence>` of its source."""
    offline: bool = False
    """Whether the trajectories were sampled for another training run."""
    closed_by: Literal["size", "timeout", "replay"] = "size"
    split: Split = "train"
    """Split of the members. Trajectories of different splits with one group id form separate groups."""
    batch: TrainingBatch | None = None
    """The batch that the group is trained in; `null`: the trainer forms its steps of any groups."""
    owner: str = ""
    """Name of the API key that opened the group's first trajectory to complete."""

    def discarded(self, **fields: Any) -> GroupDiscarded:
        """Return the event that discards this group, all of its trajectories. `fields`: those of the event that the
        group does not have, such as `reason` and `by`, and others to replace the group's."""
        shared_names = ("project", "model", "group", "split", "branch", "owner", "judge")
        shared = {name: getattr(self, name) for name in shared_names}
        return GroupDiscarded(**{**shared, "trajectories": tuple(m.trajectory for m in self.members), **fields})


DiscardReason = Literal[
    "too_small",
    "late",
    "unscored",
    "no_variance",
    "no_tokens",
    "stale",
    "history_gone",
    "over_budget",
    "validation",
    "repeated",
    "too_large",
    "incomplete",
    "outside_model",
]
"""Why trajectories will not be trained."""


class GroupDiscarded(Event, frozen=True, kw_only=True, tag="group.discarded"):
    """Trajectories that will not be trained, and the reason."""

    subject_fields = ("project", "model", "group", "branch")

    group: str
    model: str
    trajectories: tuple[str, ...]
    reason: DiscardReason
    """`no_tokens`: no run has a token to train; `detail` says why, as that none made a recorded call. `over_budget`: a
    limit of `[budget]` is reached. `too_large`: a sequence of these trajectories does not fit into
    the trainer's memory, even alone. The rest of the group was trained, in `version`. `incomplete`: the batch that the
    group's agent requested lacks other groups. `outside_model`: a provider's model answered, no policy."""
    by: str
    """Service that discarded them."""
    detail: str = ""
    version: str = ""
    """Policy version at the time, if the reason depends on it."""
    duration_s: float = 0.0
    """Duration of the longest trajectory, in seconds. It shows whether long tasks are discarded more often."""
    branch: str = "main"
    split: Split = "train"
    owner: str = ""
    """Name of the API key that opened the trajectories."""
    judge: str = ""
    """Verdict set of the scored group that the trainer discarded, or that `journeywork rejudge` could not make. The
    group may train under another one."""

    def message_id(self) -> str:
        """Return the event's identity, as `Event.message_id`. A group has several such events, one for each reason,
        service and verdict set, and one for each late trajectory."""
        first = self.trajectories[0] if self.trajectories else ""
        of_set = f"/{self.judge}" if self.judge else ""
        return f"{self.project}/{self.model}/{self.branch}/{self.group}/{first}/{self.reason}/{self.by}{of_set}"


class JudgeMeasured(Event, frozen=True, kw_only=True, tag="group.measured"):
    """Measurements of a judge: its position bias, and its agreement with itself or with groups of known rewards."""

    subject_fields = ("project", "ruler", "kind")
    message_id_format = "{0.project}/{0.ruler}/measured/{0.kind}/{0.judge}/{0.at}"

    kind: Literal["groups", "anchors"]
    """`groups`: over all groups that this judge process scored so far; `anchors`: one run over the anchor groups."""
    judge: str
    """Hash of the judge configuration: the verdict set of the groups that this judge scores."""
    model: str
    """The judge model as configured."""
    ruler: str
    """Name of the reward that the judge scores; `ruler` where `judge.rewards` is empty."""
    rubric: str = ""
    rubric_hash: str = ""
    groups: int = 0
    """Number of groups that were measured."""
    failed: int = 0
    """Passes (or anchor groups) without scores."""
    recent_passes: int = 0
    """Passes over groups since the previous event of this process, with and without scores."""
    recent_failed: int = 0
    """Passes without scores among `recent_passes`."""
    failure: str = ""
    """Why the last pass without scores failed, without text of a run; empty if none failed."""
    calls: int = 0
    asked_again: int = 0
    """Calls that were repeated because a reply could not be read."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    self_agreement: float | None = None
    """Share of pairs of trajectories that two passes over a group put into the same order; of a judge of what happened
    next, share of calls to which two votes gave the same score."""
    position_bias: float | None = None
    """Mean advantage of the first place in the prompt, in points of score, before it is corrected."""
    kendall_tau: float | None = None
    """Agreement with the known rewards of the anchors."""
    pairwise_accuracy: float | None = None
    sign_flips: float | None = None
    """Share of anchor trajectories whose advantage has the wrong sign."""
    alarm: bool = False
    """Whether `kendall_tau` is below `judge.anchors.min_tau`."""


class GroupAhead(msgspec.Struct, frozen=True, kw_only=True):
    """A group that is ahead of the trainer: admitted, and neither trained nor discarded."""

    group: str
    at: Micros
    """Stream time of its admission."""
    owner: str = ""
    """Name of the API key whose share of `gateway.max_groups_ahead` it takes."""


class GroupAdmitted(Event, frozen=True, kw_only=True, tag="group.admitted"):
    """A gateway admitted a group (`gateway.max_groups_ahead`). A model's newest event lists the groups that are ahead
    of the trainer, over all gateways. A gateway can publish the next event only if it has read the newest one."""

    subject_fields = ("project", "model")
    message_id_format = "{0.project}/{0.model}/{0.group}/admitted/{0.at}"

    group: str
    model: str
    owner: str = ""
    """Name of the API key that opened it."""
    ahead: tuple[GroupAhead, ...] = ()
    """The groups that were ahead of the trainer, without this one."""
