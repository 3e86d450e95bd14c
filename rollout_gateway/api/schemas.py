"""Bodies of the control API's requests (docs/gateway.md describes them for clients). A field that they don't have is an
error. The body of a completion is `capture.registry.Completion`; those of decisions are in `serving.promotion`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from pipeline.events import PolicyEvaluated
from pipeline.events.types import Number
from pipeline.names import MAX_NAME
from rollout_gateway.capture.registry import Completion
from rollout_gateway.serving.promotion import RequestId

_Count = Annotated[int, Meta(ge=0, lt=2**31)]


class Opening(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/trajectories`."""

    model: str
    group: str = ""
    """Empty: a group of its own."""
    task: str = ""
    id: str = ""
    """Empty: a new id."""
    split: Literal["train", "val"] = "train"
    group_size: _Count = 0
    attempt: _Count = 0
    metadata: dict[str, Any] = {}
    pinned: str = ""
    """Exact version that answers every call; if empty, the version that `model` is routed to."""
    key_completes: bool = False
    """Whether the trajectory's own key may complete it, and so decide its reward."""
    references: bool = False
    """Whether every choice of an answer names its exchange in `journeywork`. Other trajectories can be completed with
    these references as `exchanges`."""


class Demonstration(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation that the model did not have, whose replies are to be trained."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class GroupMember(Completion, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One trajectory of a group, with its results."""

    id: str
    demonstration: Demonstration | None = None
    """Conversation that makes up the trajectory, in place of `exchanges`. It takes an operator's key."""


class GroupCompletion(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/groups/{group}/complete`. A member with `exchanges` or a `batch` that was not opened is
    opened with the other fields."""

    trajectories: Annotated[list[GroupMember], Meta(max_length=1024)]
    model: str = ""
    task: str = ""
    split: Literal["train", "val"] = "train"


LONGEST_TEXT = 65536
"""Characters of a text or correction."""
_Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]


class Feedback(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What somebody says about a run or a call: one of `value`, `thumb`, `correction`, `corrected_by` and `text`."""

    name: Annotated[str, Meta(max_length=MAX_NAME)] = "feedback"
    """Name by which settings refer to it."""
    value: Number | None = None
    scale: tuple[Number, Number] | None = None
    """Lowest and highest number of the scale that `value` is on; it is mapped to 0..1. `None`: it stays as it is."""
    thumb: Literal["up", "down"] | None = None
    """1 or -1."""
    correction: _Text = ""
    """The answer that the call should have given."""
    corrected_by: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """Id of a run whose last answer is the answer that the call should have given."""
    text: _Text = ""
    """Words about it, or a comment on a number."""
    key: RequestId = ""
    source: Annotated[str, Meta(max_length=MAX_NAME)] = "api"


class RunFeedback(Feedback, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/trajectories/{trajectory}/feedback`."""

    call: Annotated[int, Meta(ge=-1, lt=2**31)] | Annotated[str, Meta(min_length=1, max_length=1024)] = -1
    """Number of a call, or the id of its answer. -1: the whole run."""


class AnswerFeedback(Feedback, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/feedback`."""

    answer: Annotated[str, Meta(max_length=1024)] = ""
    ranking: Annotated[list[str], Meta(max_length=1024)] = []
    """Ids of runs or answers, best first."""
    about: Literal["call", "run"] = "call"
    """What the id of an answer stands for: the call that gave it, or the whole run that the call belongs to."""


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
"""Made of the event's fields, with bounds for integers."""
