"""A trajectory (one agent run) as the client sees it, and the options for opening and completing it.

`journeywork.client` opens trajectories and gives them to agent code, which calls the model at `base_url` and sets the
result. The checks of results and feedback are here, so that an error names the field before anything is sent. A
*policy* is a model that is trained; its *version* after a step is `<model>@<step>`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, cast, get_args

from typing_extensions import Unpack

Outcome = Literal["scored", "no_result", "masked"]


class OpenOptions(TypedDict, total=False):
    """Options of `open` and `trajectory`. docs/gateway.md describes each."""

    id: str
    """Id of the trajectory. By default the client chooses a random one."""
    group: str
    """Rewards are compared within a group. A trajectory opened without a group forms a group of one."""
    group_size: int
    """Number of trajectories in the group; the judge waits for that many before it scores the group."""
    attempt: int
    """Number of the attempt within the group, from 1."""
    task: str
    """Description of the task that the judge reads."""
    split: Literal["train", "val"]
    """`val` trajectories are recorded but never trained on. Default: `train`."""
    metadata: dict[str, Any]
    pinned: str
    """A policy version that answers every call of the trajectory, such as `support@12`."""
    key_completes: bool
    """Whether the API key of the trajectory may complete it, and so set its reward. Default: false."""
    references: bool
    """Whether every choice of an answer names its recorded call in `journeywork`. Default: false."""


class CompleteOptions(TypedDict, total=False):
    """Options of `complete`: the result of a trajectory."""

    reward: float | None
    rewards: dict[str, float]
    metrics: dict[str, float]
    metadata: dict[str, Any]
    outcome: Outcome


class FeedbackOptions(TypedDict, total=False):
    """Options of `feedback`: one of `value`, `thumb`, `ranking`, `correction`, `corrected_by` and `text`.
    docs/gateway.md describes each."""

    name: str
    """Name by which settings refer to it. Default: `feedback`."""
    value: float
    scale: tuple[float, float]
    """Lowest and highest number of the scale that `value` is on."""
    thumb: Literal["up", "down"]
    ranking: Sequence[Any]
    """Answers, or ids of runs or answers, best first."""
    about: Literal["call", "run"]
    """With the id of an answer, or a ranking of such: its call, or the whole run. Default: `call`."""
    correction: str
    """The answer that the call should have given."""
    corrected_by: str
    """Id of a run whose last answer is the answer that the call should have given, such as a run of an outside
    model."""
    text: str
    """Words, or a comment on a number."""
    key: str
    """Id of the feedback: sending it again changes nothing. By default every call is further feedback."""
    source: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What the model calls of a run took."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    calls_s: float = 0.0
    """Seconds, added up over the calls."""

    @classmethod
    def of_completion(cls, answer: Mapping[str, Any]) -> Usage:
        """Return what the gateway's answer to a completion says."""
        return cls(answer["calls"], answer["prompt_tokens"], answer["sampled_tokens"], answer["calls_s"])


@dataclass(slots=True, weakref_slot=True)
class Trajectory:
    """One agent run. Call the model with any OpenAI client at `base_url` with `api_key`, then set the result.

    Setting an attribute that a run does not have raises `AttributeError`, so that a misspelt `reward` is not lost."""

    id: str
    model: str
    group: str
    base_url: str
    api_key: str = field(repr=False)
    reward: float | None = None
    """`None` lets the judge assign the reward."""
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    outcome: Outcome = "scored"
    """`no_result`: the infrastructure failed, so the run does not reflect the policy. `masked`: keep the run, but do
    not train on it."""
    prompt: str = ""
    """System prompt that `journeywork prompt` or an evaluation has the agent play with. Empty: the agent's own."""
    usage: Usage | None = None
    """Known once the trajectory is completed."""
    duration_s: float | None = None
    """Seconds from opening to completing, in a trajectory that `gather` played."""

    _send_feedback: Callable[..., Any] | None = field(default=None, repr=False, compare=False)
    """`feedback` of the client that opened the trajectory; `None` in one that no client opened."""

    def feedback(self, answer: Any = None, **options: Unpack[FeedbackOptions]) -> Any:
        """Give feedback on the run, or on the call of an answer: the answer, its id, or the call's number from 0.

        In a coroutine, await it. Raises `JourneyworkError` if the gateway refuses it, `RuntimeError` in a trajectory
        that no client opened."""
        if self._send_feedback is None:
            raise RuntimeError("no client opened this trajectory: use `feedback` of a client of the gateway")
        return self._send_feedback(answer, trajectory=self.id, **options)

    def reward_call(self, answer: Any, reward: float, name: str = "reward") -> Any:
        """Reward one call of the run: feedback with a `value` on it. Under the name `reward` it counts without any
        setting, as the run's own `reward` does."""
        return self.feedback(answer, value=reward, name=name)

    @property
    def openai(self) -> dict[str, Any]:
        """Arguments for `openai.OpenAI(**run.openai)`, with enough retries to survive a restart of the gateway."""
        return {"base_url": self.base_url, "api_key": self.api_key, "max_retries": 8}

    def role(self, name: str) -> dict[str, Any]:
        """Arguments as `openai`, for the calls of one agent of a run with several. The rewards of its calls are
        credited to its own calls only, the run's reward to those of all."""
        return {**self.openai, "default_headers": {"x-journeywork-role": name}}

    def result(self) -> CompleteOptions:
        """Return how the run went, as `complete` takes it. Numbers may be bools or NumPy scalars.

        Raises `TypeError` or `ValueError` for a reward or metric that is no finite number, for an unknown outcome, and
        for metadata that JSON cannot hold."""
        result = {name: getattr(self, name) for name in CompleteOptions.__annotations__}
        return checked_result(cast(CompleteOptions, result))


def checked_result(result: CompleteOptions) -> CompleteOptions:
    """Return a result with all numbers as floats. Raises `TypeError` or `ValueError` that names the field."""
    checked: CompleteOptions = {**result}
    if (outcome := result.get("outcome", "scored")) not in get_args(Outcome):
        raise ValueError(f"outcome must be one of {', '.join(get_args(Outcome))}, not {outcome!r}")
    if (reward := result.get("reward")) is not None:
        checked["reward"] = finite_number("reward", reward)
    if "rewards" in result:
        checked["rewards"] = _numbers("rewards", result["rewards"], "; the reward of the run is `reward`")
    if "metrics" in result:
        checked["metrics"] = _numbers("metrics", result["metrics"])
    if "metadata" in result:
        try:
            json.dumps(result["metadata"], allow_nan=False)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"metadata must be what JSON can hold: {error}") from error
    return checked


def feedback_body(answer: Any, trajectory: str, options: FeedbackOptions) -> dict[str, Any]:
    """Return the body for feedback. Raises `TypeError` or `ValueError` for what cannot be sent."""
    body: dict[str, Any] = {**options}
    if "value" in body:
        body["value"] = finite_number("value", body["value"])
    if "scale" in body:
        body["scale"] = [finite_number("scale", end) for end in body["scale"]]
    if "ranking" in body:
        body["ranking"] = [answer_id(ranked) for ranked in body["ranking"]]
    if answer is not None:
        body["call" if trajectory else "answer"] = answer_id(answer)
    return body


def answer_id(answer: Any) -> Any:
    """Return the id of an answer: of a client library's object, a dict, or an id or a call's number as it is."""
    identity = answer.get("id") if isinstance(answer, Mapping) else getattr(answer, "id", answer)
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise TypeError(f"{answer!r} is no answer: give the answer, its id, or the number of the call")
    return identity


def _numbers(field: str, values: object, hint: str = "") -> dict[str, float]:
    """Return named numbers as floats. Raises `TypeError` or `ValueError`, which names `field`; `hint` ends the message
    about what is no dict."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{field} must be a dict of numbers by name, not {values!r}{hint}")
    for name in values:
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise ValueError(f"a name in {field} must be printable text, not {name!r}")
    return {name: finite_number(f"{field}[{name!r}]", value) for name, value in values.items()}


def parse_policy(text: str) -> tuple[str, str]:
    """Return the model that `<model>` or `<model>@<step>` names, and the policy version, empty where no step is named.

    `<model>@base` is the base model, as `<model>@0` is. Raises `ValueError` for any other step."""
    model, at, step = text.rpartition("@")
    if not at:
        model, step = text, ""
    if step == "base":
        step = "0"
    if not model or (at and not (step.isascii() and step.isdigit())):
        raise ValueError(f"{text!r} is no policy: write <model>, <model>@<step> or <model>@base")
    return model, f"{model}@{step}" if at else ""


def finite_number(where: str, value: object) -> float:
    """Return `value` as a float. Raises `TypeError` or `ValueError`, which names it as `where`."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"{where} must be a number, not {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{where} must be finite, not {value!r}")
    return number
