"""Bodies and answers of the HTTP API. `/openapi.json` is generated from them.

A request struct that says so describes a body for the document only; the gateway takes more than it says.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from pipeline.events import PolicyEvaluated
from pipeline.names import MAX_NAME
from rollout_gateway.capture.registry import Completion, Numbers
from rollout_gateway.serving.promotion import By, RequestId

_CHARACTER = r"([^\p{C}\p{Z}]| )"
Name = Annotated[str, Meta(extra_json_schema={"pattern": f"^{_CHARACTER}{{1,{MAX_NAME}}}$"})]
"""An id as `pipeline.names.check_name` accepts it."""
OptionalName = Annotated[str, Meta(extra_json_schema={"pattern": f"^{_CHARACTER}{{0,{MAX_NAME}}}$"})]
Whole = Annotated[float, Meta(ge=0, lt=2**31, multiple_of=1)]
"""A whole number. In JSON, 3.0 is one too."""
Count = Annotated[int, Meta(ge=0)]
JsonObject = Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]


class Body(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body whose fields are all known: any other field is an error."""


# -- trajectories --------------------------------------------------------------------------------------------------


class Opening(Body, frozen=True, kw_only=True):
    """Body of `POST /v1/trajectories`."""

    model: str
    group: OptionalName = ""
    """Empty: a group of its own."""
    task: str = ""
    id: OptionalName = ""
    """Empty: a new id."""
    split: Literal["train", "val"] = "train"
    group_size: Whole = 0
    attempt: Whole = 0
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
    object: Literal["trajectory"] = "trajectory"
    model: str
    group: str
    api_key: str
    base_url: str


class GroupMember(Completion, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One trajectory of a group, with its results."""

    id: Name


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
    object: Literal["label"] = "label"
    by: str
    request: str


class Completed(Struct, kw_only=True):
    id: str
    object: Literal["trajectory"] = "trajectory"
    outcome: str
    reward: float | None
    exchanges: Count
    calls: Count
    prompt_tokens: Count
    sampled_tokens: Count
    calls_s: Annotated[float, Meta(ge=0)]
    """Seconds that the run's model calls took, added up."""


class GroupCompleted(Struct, kw_only=True):
    object: Literal["list"] = "list"
    group: str
    data: list[Completed]


class GroupState(Struct, kw_only=True):
    object: Literal["group"] = "group"
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
    object: Literal["trajectory"] = "trajectory"
    status: Literal["open", "completed"]
    project: str
    model: str
    group: str
    task: str
    attempt: Count
    split: Literal["train", "val"]
    group_size: Count
    pinned: str | None
    metadata: JsonObject
    exchanges: Count
    opened_at: Count
    """Microseconds since the Unix epoch."""
    outcome: str | None = None
    reward: float | None = None
    rewards: Numbers = {}
    metrics: Numbers = {}


def _evaluation_fields() -> list[tuple[str, Any, Any]]:
    """The fields of the event that a client sends."""
    stricter: dict[object, Any] = {int: Annotated[int, Meta(ge=0, lt=2**53)]}
    fields = []
    for field in msgspec.structs.fields(PolicyEvaluated):
        if field.name not in ("project", "at", "v", "by"):
            kind = Name if field.name in ("evaluation", "model") else stricter.get(field.type, field.type)
            fields.append((field.name, kind, field.default))
    return fields


EvaluationBody = msgspec.defstruct(
    "EvaluationBody",
    _evaluation_fields(),
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    namespace={"__doc__": "Body of `POST /v1/evaluations`: the event, without what the gateway adds."},
)


class Recorded(Struct, kw_only=True):
    """Answer to an evaluation."""

    object: Literal["evaluation"] = "evaluation"
    evaluation: str
    position: int


class TrajectoryList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[TrajectoryState]
    has_more: bool


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
    object: Literal["list"] = "list"
    data: list[Policy]


# -- without sampling ----------------------------------------------------------------------------------------------


class TokenizeBody(Struct, kw_only=True):
    """Describes the body of `POST /tokenize`. `messages` in place of `prompt` is taken too."""

    model: str
    prompt: str


class Turn(Struct, kw_only=True):
    """Describes a message."""

    role: Literal["user", "assistant"]
    content: str


Turns = Annotated[list[Turn], Meta(min_length=1)]


class CountTokensBody(Struct, kw_only=True):
    """Describes the body of `POST /v1/messages/count_tokens`."""

    model: str
    messages: Turns


# -- model calls ---------------------------------------------------------------------------------------------------

MaxTokens = Annotated[int, Meta(ge=1)]


class _CallBody(Struct, kw_only=True):
    model: str
    stream: bool | UnsetType = UNSET
    temperature: Annotated[float, Meta(ge=0, le=2)] | UnsetType = UNSET
    top_p: Annotated[float, Meta(gt=0, le=1)] | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET


class ChatBody(_CallBody, kw_only=True):
    """Describes the body of a chat completion."""

    messages: Turns
    max_tokens: MaxTokens | UnsetType = UNSET
    n: Annotated[int, Meta(ge=1, le=128)] | UnsetType = UNSET


class CompletionsBody(_CallBody, kw_only=True):
    """Describes the body of a completion."""

    prompt: str
    max_tokens: MaxTokens | UnsetType = UNSET


class ResponsesBody(_CallBody, kw_only=True):
    """Describes the body of a response."""

    input: str
    instructions: str | UnsetType = UNSET
    max_output_tokens: MaxTokens | UnsetType = UNSET


class MessagesBody(_CallBody, kw_only=True):
    """Describes the body of an Anthropic message."""

    messages: Turns
    max_tokens: MaxTokens
    system: str | UnsetType = UNSET


class CallAnswer(Struct, kw_only=True):
    """Describes what every answer to a model call has."""

    id: str
    model: str


# -- errors --------------------------------------------------------------------------------------------------------


class ErrorDetail(Struct, kw_only=True):
    message: str


class Error(Struct, kw_only=True):
    """OpenAI's format."""

    error: ErrorDetail


class MessagesErrorDetail(Struct, kw_only=True):
    type: str
    message: str


class MessagesError(Struct, kw_only=True):
    """Anthropic's format."""

    type: Literal["error"]
    error: MessagesErrorDetail
