"""Events of evaluations, in stream POLICY, where they are kept with the versions that they are about."""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeline.events.base import Event
from pipeline.events.types import Number


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """The mean over tasks of the reward or of one metric, with its 95 % interval."""

    name: str
    """`reward`, or the name of a metric."""
    mean: Number
    low: Number | None = None
    """`null` if there are too few tasks for an interval."""
    high: Number | None = None
    count: int = 0
    """Number of tasks with a value."""
    difference: Number | None = None
    """Mean over tasks of this entrant's value minus the baseline's. `null` for the baseline itself."""
    difference_low: Number | None = None
    difference_high: Number | None = None
    pairs: int = 0
    """Number of tasks for which both have a value."""


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts of one entrant at one task."""

    task: str
    reward: Number | None = None
    """Mean over the attempts that have a reward."""
    metrics: dict[str, Number] = {}
    attempts: int = 1
    failed: int = 0
    trajectories: tuple[str, ...] = ()
    """Ids of the runs on the log. Empty for a model that the gateway does not serve."""


class PolicyEvaluated(Event, frozen=True, kw_only=True, tag="policy.evaluated"):
    """The results of one entrant of an evaluation on held-out tasks: a policy version, or an external model."""

    subject_fields = ("project", "model", "evaluation")
    message_id_format = "{0.project}/evaluation/{0.evaluation}/{0.position}"

    evaluation: str
    """Id that the entrants of one evaluation share."""
    entrant: str
    """Name of the entrant as it was given, such as `support@12` or a URL that ends in `#model`."""
    position: int = 0
    """Place among the entrants. Entrant 0 is the baseline of the differences."""
    kind: Literal["policy", "external"] = "policy"
    model: str
    """Serving name of the policy; for an external entrant, its name."""
    version: str = ""
    """Policy version that was pinned. Empty for an external entrant, and if versions changed while it played."""
    scenarios: str = ""
    """Where the tasks come from, such as `examples.tictactoe.agent:held_out`."""
    rollout: str = ""
    """The function that played them."""
    prompt: str = ""
    """System prompt that the rollout was given. Empty: the agent's own."""
    measures: tuple[Measure, ...] = ()
    tasks: tuple[TaskResult, ...] = ()
    runs: int = 0
    failed: int = 0
    """Runs that raised."""
    calls: int = 0
    """Model calls that the gateway served: 0 for an external entrant."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    call_s: Number | None = None
    """Mean seconds of a model call."""
    run_p50_s: Number | None = None
    """Median seconds of a run."""
    run_p95_s: Number | None = None
    wall_s: Number = 0.0
    cost_usd: Number | None = None
    """Cost, if the client that recorded the event reported it."""
    by: str = ""
    """Name of the API key that recorded it."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """A branch of a what-if question."""

    branch: str
    version: str
    """Its last version, as the gateway serves it: `<model>+<branch>@<step>`."""
    settings: str = "{}"
    """JSON: what differs from the run's settings, by dotted names."""
    groups: int = 0
    """Number of groups that it was trained on."""


class WhatIfAnswered(Event, frozen=True, kw_only=True, tag="policy.what_if"):
    """What the policy would have learned from a part of the history under other settings: `journeywork what-if` trained
    a branch for each variant of the settings and compared it with a version of `main` on held-out tasks."""

    subject_fields = ("project", "model")
    message_id_format = "{0.project}/what-if/{0.question}/{0.evaluation}"

    model: str
    question: str
    """Hash of the selection and of all settings."""
    selection: str = "true"
    """SQL over the view `groups`."""
    groups: int = 0
    """Number of groups selected."""
    start: str = ""
    """What training on the branches began with, as in `models.start`; empty: a fresh adapter."""
    baseline: str
    """The version of `main` that they are compared with."""
    variants: tuple[Variant, ...] = ()
    evaluation: str
    """Id of the evaluation of the baseline and of the variants' versions."""
