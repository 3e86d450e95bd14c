"""Events about an outside model and the policy that learns from it, in stream ROLLOUTS.

The outside model answers the agents. Its *apprentice*, a policy, answers some of the same calls unseen (*shadow*
calls), and the judge compares both answers. So it is known how good the apprentice is before it answers anybody."""

from __future__ import annotations

from pipeline.events.base import Event
from pipeline.events.group import Verdict
from pipeline.events.types import Json, Logprobs, Micros, TokenIds


class ShadowAnswered(Event, frozen=True, kw_only=True, tag="rollout.shadow"):
    """What an apprentice answered to a call that an outside model had answered. It reached no agent, is part of no run
    and trains nothing."""

    subject_fields = ("project", "trajectory", "call")
    unique_subject = True

    trajectory: str
    call: int
    """`seq` of the exchange in which the outside model answered."""
    model: str
    """The apprentice."""
    policy_version: str
    step: int
    outside: str
    """Name of the outside model."""
    response: Json
    """The chat completion."""
    prompt_tokens: int = 0
    sampled_ids: TokenIds
    logprobs: Logprobs
    """Logprobs of `sampled_ids`, under the distribution they were sampled from."""
    finish_reason: str = ""
    same: bool
    """Whether its text and tool calls equal those of the outside model; JSON by its values, other text without the
    space around it."""
    replica: str = ""
    started_at: Micros = 0


class AnswersCompared(Event, frozen=True, kw_only=True, tag="rollout.compared"):
    """How the judge scored the answers of an outside model and of a policy to the same call, in both orders: a shadow
    call whose answers are not the same, or a call that the outside model corrected (`judge.healing`)."""

    subject_fields = ("project", "trajectory", "call")
    unique_subject = True

    trajectory: str
    call: int
    """`seq` of the exchange in which one of the two answered."""
    model: str
    """The policy model."""
    outside: str
    """Name of the outside model."""
    outside_score: float
    """Score of the outside model's answer, from 0 to 1."""
    apprentice_score: float
    """Score of the policy's answer."""
    verdicts: tuple[Verdict, ...] = ()
    """One for each order; their scores are of `outside` and `apprentice`. None where there was nothing to compare: the
    outside model gave the same answer, none or none in time, or no judge model was to be had."""
    outside_usd: float = 0.0
    """What the outside model's correction cost, in USD, by the prices of `[[outside]]`; 0 for a shadow call."""
