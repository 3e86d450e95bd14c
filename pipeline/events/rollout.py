"""Events of agent runs, in stream ROLLOUTS.

A *trajectory* is one run of an agent on one task, from its opening to its completion. An *exchange* is one call of a
model in it: request, answer, and the tokens that were sampled. Trajectories of one task are a *group*."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Literal

import msgspec

from pipeline.events.base import Event
from pipeline.events.types import Json, Logprobs, Micros, Outcome, Split, TokenIds, TokenMask
from pipeline.names import InvalidNameError, check_name


def group_key(group: str, trajectory: str) -> str:
    """Return the name of a trajectory's group in subjects and in events about the group. Without a group id the
    trajectory is a group of its own; an id that no subject can hold is hashed."""
    if not group:
        return trajectory
    try:
        return check_name(group)
    except InvalidNameError:
        return "hashed-" + hashlib.sha256(group.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class TrainingBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that are trained together, in one step of their own."""

    id: str
    groups: tuple[str, ...]
    """The groups of the batch. The step begins when each of them is scored or discarded."""
    settings: Json = b"{}"
    """Settings of the step that differ from the trainer's, by their names below `trainer`:
    `{"optimizer.learning_rate": 1e-5, "loss.type": "cispo"}`."""
    owner: str = ""
    """Name of the API key that requested the batch. Batches of different keys with one id are different batches."""

    def on_branch(self, groups: Collection[str]) -> TrainingBatch:
        """Return the batch for a branch on which only `groups` are published: without its other groups, for which the
        trainer of that branch would wait."""
        return msgspec.structs.replace(self, groups=tuple(g for g in self.groups if g in groups))


class GroupOpened(Event, frozen=True, kw_only=True, tag="rollout.group"):
    """A group was opened, by its first trajectory. The event sets the group's owner and its number of trajectories, for
    all splits. A run without a group, whose id the gateway made, has no such event: the owner of the run owns its
    group."""

    subject_fields = ("project", "model", "group")
    unique_subject = True

    group: str
    model: str
    owner: str = ""
    """Name of the API key that opened it. Only that key and operators may add trajectories. Empty: opened without a
    key."""
    group_size: int = 0
    """Trajectories that the caller will put into the group. 0: `judge.group_size`."""


class TrajectoryEvent(Event, frozen=True, kw_only=True):
    """What the opening of a trajectory says of it, and its completion says again."""

    trajectory: str
    model: str
    """Serving name of the policy, `<model>`."""
    group: str
    """Trajectories of one group are attempts at the same task."""
    task: str = ""
    """The task of the group, if the caller names it: free text or an id."""
    attempt: int = 0
    split: Split = "train"
    """`val` trajectories are scored and never trained."""
    group_size: int = 0
    """Trajectories that the caller will put into the group, as its `rollout.group` says. 0: `judge.group_size`."""
    owner: str = ""
    """Name of the API key that opened the trajectory; only that key and operators may use the trajectory. Empty:
    opened without a key."""


class TrajectoryOpened(TrajectoryEvent, frozen=True, kw_only=True, tag="rollout.opened"):
    """An agent run began. The event holds all that a gateway replica needs to rebuild the trajectory."""

    subject_fields = ("project", "trajectory")
    unique_subject = True

    pinned: str = ""
    """Policy version that serves this trajectory. Empty: the promoted one."""
    metadata: Json = b"{}"
    paced_s: float = 0.0
    """Seconds from the group's first refusal (429) until its first trajectory was opened."""
    key_completes: bool = False
    """Whether the trajectory's own key may complete it and report its reward."""
    references: bool = False
    """Whether every choice of an answer names its exchange, so that another trajectory can be made of it."""
    asked: str = ""
    """The outside model that the agent names, where a decision about it chose who answers the run: `model` and `pinned`
    for the whole run. Empty: no decision, or no outside model."""
    min_logprob: float | None = None
    """Of such a run of the apprentice: an answer with a lower mean logprob is not shown, and the outside model
    answers."""

    @property
    def named(self) -> str:
        """The model that the run's calls name: the outside model, if a decision chose who answers the run in its
        place, else `model`."""
        return self.asked or self.model

    def as_asked(self) -> TrajectoryOpened:
        """Return the opening as it was asked for, before a decision was applied to it."""
        if not self.asked:
            return self
        return msgspec.structs.replace(self, model=self.asked, asked="", pinned="", min_logprob=None)


class ExchangeRecorded(Event, frozen=True, kw_only=True, tag="rollout.exchange"):
    """One choice of one model call: exactly what was sent, sampled and answered."""

    subject_fields = ("project", "trajectory")
    message_id_format = "{0.project}/{0.trajectory}/{0.seq}.{0.choice}"

    trajectory: str
    seq: int
    """Position of the call in its trajectory, from 0."""
    choice: int = 0
    """Index of the choice when the client asked for n > 1: such a call is n events with one `seq`."""
    model: str
    policy_version: str
    """`<model>@<step>` that sampled; the version routed to when the request began. `outside:<name>`: an outside model
    answered, without tokens."""
    step: int
    """-1 where an outside model answered."""
    group: str = ""
    request: Json
    """The client's request body; with a promoted prompt in place of the client's, if `prompt` names one."""
    response: Json
    """The chat completion as the client received it. The chunks of a stream are joined."""
    prompt_ids: TokenIds
    sampled_ids: TokenIds
    """Sampled token ids, as vLLM returned them, including the end-of-turn token where one was sampled."""
    logprobs: Logprobs
    """Logprobs of `sampled_ids`, under the distribution they were sampled from."""
    forced: TokenMask = b""
    """1 where a grammar constrained the choice; such tokens are never trained. Empty: no token was constrained."""
    finish_reason: str = ""
    status: Literal["complete", "cancelled", "failed", "unsure"] = "complete"
    """`cancelled`: the client went away; `failed`: the upstream broke off, or its answer can't be read. The tokens
    that were read until then are recorded. `unsure`: the apprentice's answer was not shown, because its mean logprob is
    too low."""
    side_call: bool = False
    """A call that is no part of the task (a title, a summary): recorded, not trained."""
    role: str = ""
    """The agent that made the call, in a run of several agents."""
    endpoint: str = "/v1/chat/completions"
    streamed: bool = False
    request_hash: str = ""
    """SHA-256 of endpoint and canonical body: a retried request is answered from here instead of sampled again."""
    replica: str = ""
    """The vLLM replica that answered; of an outside model, the URL of its provider."""
    started_at: Micros = 0
    first_token_at: Micros = 0
    """0 where the reply was not streamed."""
    prompt: str = ""
    """Id of the promoted prompt that the model saw in place of the agent's (`policy.promoted`). Empty: none."""
    copied_from: str = ""
    """`<trajectory>/<seq>` of the exchange that this one is a copy of: the trajectory was made of calls that were
    recorded in another one. Empty: the call was made in this trajectory."""
    input_tokens: int = 0
    """Of an outside model: tokens of the prompt by the provider's count, cached ones included. Of several choices, the
    first one has the usage and the cost."""
    cached_tokens: int = 0
    """Of these, how many the provider read from its cache."""
    output_tokens: int = 0
    """Tokens of the answer by the provider's count, reasoning included."""
    cost_usd: float | None = None
    """What the call of an outside model cost by its table's prices; `null` where the provider told no usage."""
    error: str = ""
    """Why the call of an outside model failed."""
    failed_providers: tuple[str, ...] = ()
    """Who was asked before this one, each with what happened: providers, and the version of an apprentice."""


class TrajectoryCompleted(TrajectoryEvent, frozen=True, kw_only=True, tag="rollout.completed"):
    """An agent run ended, once."""

    subject_fields = ("project", "model", "group_key", "trajectory")
    unique_subject = True

    outcome: Outcome = "scored"
    """`no_result`: infrastructure failed, never becomes a reward; `masked`: kept, never trained."""
    reward: float | None = None
    """The agent's reward for the run; `null` if the judge decides."""
    rewards: dict[str, float] = {}
    """Named components, for composed rewards."""
    metrics: dict[str, float] = {}
    metadata: Json = b"{}"
    """That of the opening and that of the completion; of a key that both have, the completion's value."""
    exchanges: int = 0
    """How many exchange events (choices count singly) belong to the run."""
    first_step: int = 0
    last_step: int = 0
    """Lowest and highest policy step among the exchanges."""
    opened_at: Micros = 0
    inferred: bool = False
    """The gateway inferred where the trajectory began and ended."""
    batch: TrainingBatch | None = None
    """The batch that the trajectory's group is trained in; `null`: the trainer forms its steps of any groups."""
    calls: int = 0
    """Model calls. A call with several choices is several exchanges."""
    prompt_tokens: int = 0
    """Tokens of all prompts of the run. The choices of one call share one prompt, which counts once."""
    sampled_tokens: int = 0
    calls_s: float = 0.0
    """Seconds that the run's model calls took, added up."""
    cost_usd: float = 0.0
    """What providers charged for the run's calls, as far as it is known."""

    @property
    def group_key(self) -> str:
        """The name of its group, as `group.scored` has it."""
        return group_key(self.group, self.trajectory)


class GroupTimedOut(Event, frozen=True, kw_only=True, tag="rollout.timeout"):
    """The deadline of a group passed before the group was full. Trajectories that completed before this event belong to
    the group; later ones are late."""

    subject_fields = ("project", "model", "group")
    last_subject_field = ("split", "train")
    unique_subject = True

    group: str
    """The group, as in `group.scored`."""
    model: str
    split: Split = "train"
    timeout_s: float = 0.0
    """Time that the group had, from its first completed trajectory."""


class FeedbackTimedOut(Event, frozen=True, kw_only=True, tag="rollout.overdue"):
    """The deadline for feedback on a closed group passed (`feedback.wait_s`). The group is scored with the feedback
    that came before this event."""

    subject_fields = ("project", "model", "group")
    last_subject_field = ("split", "train")
    unique_subject = True

    group: str
    """The group, as in `group.scored`."""
    model: str
    split: Split = "train"
    wait_s: float = 0.0
    """Length of the wait, from the message that closed the group."""
