"""Bodies and answers of the control API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from pipeline.events import PolicyEvaluated
from pipeline.names import MAX_NAME
from rollout_gateway.capture.registry import Completion, Numbers
from rollout_gateway.serving.promotion import By, RequestId

Count = Annotated[int, Meta(ge=0, lt=2**31)]


class Body(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body whose fields are all known: any other field is an error."""


# -- trajectories --------------------------------------------------------------------------------------------------


class Opening(Body, frozen=True, kw_only=True):
    """Body of `POST /v1/trajectories`."""

    model: str
    group: str = ""
    """Empty: a group of its own."""
    task: str = ""
    id: str = ""
    """Empty: a new id."""
    split: Literal["train", "val"] = "train"
    group_size: Count = 0
    attempt: Count = 0
    metadata: dict[str, Any] = {}
    pinned: str = ""
    """Exact version that answers every call; if empty, the version that `model` is routed to."""
    key_completes: bool = False
    """Whether the trajectory's own key may complete it, and so decide its reward."""
    references: bool = False
    """Whether every choice of an answer names its exchange in `journeywork`. Other trajectories can be completed with
    these references as `exchanges`."""


class Opened(Struct, kw_only=True):
    id: str
    model: str
    group: str
    api_key: str
    base_url: str


class GroupMember(Completion, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One trajectory of a group, with its results."""

    id: str


class GroupCompletion(Body, frozen=True, kw_only=True):
    """Body of `POST /v1/groups/{group}/complete`. A member with `exchanges` that was not opened is opened with the
    other fields."""

    trajectories: list[GroupMember]
    model: str = ""
    task: str = ""
    split: Literal["train", "val"] = "train"


class TrajectoryLabel(Body, frozen=True, kw_only=True):
    trajectory: str
    score: Annotated[float, Meta(ge=0, le=1)]
    comment: Annotated[str, Meta(max_length=4096)] = ""


class GroupLabels(Body, frozen=True, kw_only=True):
    """Body of `POST /v1/groups/{group}/label`: a person's scores of trajectories of the group."""

    labels: Annotated[list[TrajectoryLabel], Meta(min_length=1, max_length=1024)]
    by: By = ""
    source: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    request: RequestId = ""


class Labeled(Struct, kw_only=True):
    group: str
    by: str
    request: str


class Completed(Struct, kw_only=True):
    id: str
    outcome: str
    reward: float | None
    exchanges: Count
    calls: Count
    prompt_tokens: Count
    sampled_tokens: Count
    calls_s: Annotated[float, Meta(ge=0)]
    """Seconds that the run's model calls took, added up."""


class GroupCompleted(Struct, kw_only=True):
    group: str
    data: list[Completed]


class GroupState(Struct, kw_only=True):
    group: str
    model: str
    status: Literal["waiting", "trained", "discarded", "dead"]
    """`waiting`: no checkpoint, discard or dead letter names the group. `dead`: the trainer could not use it, and it is
    among the dead letters."""
    version: str = ""
    """Policy version that the group was trained into."""
    metrics: dict[str, float] = {}
    """The trainer's metrics of that step: as `trainer/<name>`, and by ART's names where it has some."""
    reason: str = ""
    """Why the group was discarded, as in `group.discarded`, or is a dead letter."""
    detail: str = ""


class TrajectoryState(Struct, kw_only=True):
    id: str
    status: Literal["open", "completed"]
    project: str
    model: str
    group: str
    task: str
    attempt: Count
    split: Literal["train", "val"]
    group_size: Count
    pinned: str | None
    metadata: msgspec.Raw
    exchanges: Count
    opened_at: Count
    """Microseconds since the Unix epoch."""
    outcome: str | None = None
    reward: float | None = None
    rewards: Numbers = {}
    metrics: Numbers = {}


EvaluationBody = msgspec.defstruct(
    "EvaluationBody",
    [
        (field.name, Annotated[int, Meta(ge=0, lt=2**53)] if field.type is int else field.type, field.default)
        for field in msgspec.structs.fields(PolicyEvaluated)
        if field.name not in ("project", "at", "v", "by")
    ],
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    namespace={"__doc__": "Body of `POST /v1/evaluations`: the event, without what the gateway adds."},
)


class Recorded(Struct, kw_only=True):
    """Answer to an evaluation."""

    evaluation: str
    position: int


# -- models and servers --------------------------------------------------------------------------------------------


class ReplicaHealth(Struct, kw_only=True):
    replica: str
    ready: bool
    in_flight: Count
    loaded: list[str]


class Health(Struct, kw_only=True):
    status: Literal["ok"] = "ok"
    serving: bool
    """Whether calls can be answered now."""
    log: str
    """`ok`, or why the log takes no writes."""
    replicas: list[ReplicaHealth] | UnsetType = UNSET


class Model(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: Count = 0
    owned_by: str = "journeywork"


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class PolicyDecision(Struct, kw_only=True):
    """The last decision about what a model's name stands for."""

    action: Literal["promote", "rollback", "pin", "split", "follow"]
    version: str
    """Empty: the newest version."""
    other: str
    """`split`: the version that gets the rest."""
    percent: float
    """Share of trajectories that goes to `version`."""
    by: str
    reason: str
    at: Count
    """Microseconds since the Unix epoch."""


class Policy(Struct, kw_only=True):
    model: str
    version: str
    """The version that the model's name is routed to now."""
    step: Count
    newest: str
    loaded: list[str]
    refused: dict[str, str]
    """Versions that must not serve, and why."""
    decision: PolicyDecision | None = None
    """Null: nothing was decided, and the newest version serves."""


class PolicyList(Struct, kw_only=True):
    data: list[Policy]
