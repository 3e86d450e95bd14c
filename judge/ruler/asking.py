"""Asks the judge model: calls until a reply can be read, within the settings' limits, and what they cost.

`Asker` is the base of the two judges, `judge.ruler.ruler` (compares the runs of a group) and `judge.next_state` (scores
the calls of a run). They decide what is asked; here is how often, how long a prompt may be, when it is asked again and
how that is counted. A pass is one question to the judge model and ends in one verdict. It takes several calls if
replies can't be read, and what failed passes cost is added to a verdict that succeeded.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeVar

import anyio
import msgspec

from judge.errors import UnscoredError
from judge.models.chat import ChatModel, ContextWindowError, ModelError, ModelReply
from judge.ruler import prompt, replies
from judge.ruler.aggregation import JudgePass, PositionBias, pairwise_agreement
from judge.ruler.images import attach_images
from judge.ruler.replies import UnreadableReplyError
from judge.ruler.rubrics import Rubric
from judge.ruler.transcripts import Transcript
from pipeline.concurrency.backoff import Backoff
from pipeline.config import JudgeConfig
from pipeline.events import TrajectoryCompleted, Verdict
from pipeline.log.broker import HistoryGoneError
from pipeline.telemetry.logs import get_logger

logger = get_logger("judge.ruler.asking")

T = TypeVar("T")
LoadTranscript = Callable[[TrajectoryCompleted], Awaitable[Transcript]]
"""Returns what a completed run said: from the log, or from a file."""
Judged = tuple[dict[str, float], tuple[Verdict, ...]]
"""The score of each trajectory, and the verdicts behind it."""

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 60.0
"""Shortest and longest pause before a pass or a group is tried again."""
_MIN_CONTEXT_TOKENS = 2_000
"""A prompt that is refused as too long is halved down to this."""


class JudgingError(Exception):
    """A judging gave no usable scores. The message says why, without text of a run."""


@dataclass
class Usage:
    """Number, tokens and cost of calls of the judge model."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0

    def include(self, other: Usage) -> None:
        """Add the calls of `other`."""
        self.calls += other.calls
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.cost_usd += other.cost_usd


@dataclass
class JudgeStatistics:
    """Counts of a judge's work so far, and how well its passes agree."""

    groups: int = 0
    passes: int = 0
    """Passes over groups, with and without scores."""
    failed_judgings: int = 0
    failure: str = ""
    """Why the last failed pass failed."""
    asked_again: int = 0
    usage: Usage = field(default_factory=Usage)
    agreement_sum: float = 0.0
    """Over the groups with two passes, the shares of pairs of trajectories that both order equally; over the runs with
    two votes, the shares of calls that both score equally."""
    agreement_count: int = 0
    """Groups or runs in `agreement_sum`."""
    bias: PositionBias = field(default_factory=PositionBias)

    def add(self, passes: Sequence[JudgePass]) -> None:
        """Add the passes over a group."""
        self.groups += 1
        self.bias.update(passes)
        if len(passes) < 2:
            return
        if (agreement := pairwise_agreement(passes[0].scores, passes[1].scores)) is not None:
            self.agreement_sum += agreement
            self.agreement_count += 1

    def add_votes(self, votes: Sequence[Sequence[float]]) -> None:
        """Add a run, with the votes on each of its calls."""
        self.groups += 1
        if are_equal := [on_call[0] == on_call[1] for on_call in votes if len(on_call) > 1]:
            self.agreement_sum += sum(are_equal) / len(are_equal)
            self.agreement_count += 1

    def measured_fields(self) -> dict[str, Any]:
        """Return the fields of `JudgeMeasured` that are about all groups so far (of a judge of calls, all runs); `None`
        where nothing was measured."""
        return {
            "groups": self.groups,
            **asdict(self.usage),
            "failed": self.failed_judgings,
            "asked_again": self.asked_again,
            "self_agreement": self.agreement_sum / self.agreement_count if self.agreement_count else None,
            "position_bias": self.bias.first_position_effect(),
        }


class ScoredReply(NamedTuple):
    """A reply that could be read."""

    asked: prompt.Prompt
    parsed: replies.ParsedScores
    verdict: Verdict
    """With everything but the scores."""


async def no_log(run: TrajectoryCompleted) -> Transcript:
    """Raise `LookupError`. The `LoadTranscript` of a judge that never has to read a run from the log, because it is
    given transcripts (`Asker.judge`), such as those of a file."""
    raise LookupError(run.trajectory)


class Asker(ABC):
    """Asks one judge model with one rubric. Subclasses decide what is asked."""

    def __init__(self, config: JudgeConfig, rubric: Rubric, model: ChatModel, load: LoadTranscript = no_log) -> None:
        """`load` returns the transcript of a run."""
        self._config, self.rubric, self._model, self._load = config, rubric, model, load
        self._turns = anyio.CapacityLimiter(config.concurrency)
        self._rng = random.SystemRandom()
        """Draws the nonces and ids of prompts, which an agent must not be able to guess (`judge.ruler.prompt`)."""
        self._context_tokens = config.context_tokens
        self.statistics = JudgeStatistics()
        self.paused = 0
        """Groups or runs that pause before they are judged again."""

    @abstractmethod
    async def judge(self, transcripts: Sequence[Transcript], *, count: bool = True) -> Judged:
        """Judge runs without retries. `count`: add them to the statistics. Raises `JudgingError`."""

    async def retry(self, work: Callable[[], Awaitable[T]], group: str) -> T:
        """Return the result of `work`. While it raises `JudgingError` it is tried again, with growing pauses. `group`:
        the name for log lines.

        Raises `UnscoredError` if that goes on for `judge.retry_for_s`, or a trajectory has left the log."""
        began = time.monotonic()
        deadline = began + self._config.retry_for_s
        backoff = new_backoff()
        while True:
            async with self._turns:
                try:
                    return await work()
                except HistoryGoneError as error:
                    raise UnscoredError(str(error)) from error
                except JudgingError as error:
                    reason = str(error)
            pause = backoff.next_s()
            if time.monotonic() + pause > deadline:
                raise UnscoredError(f"no usable judge pass within {time.monotonic() - began:.0f} s: {reason}")
            logger.warning("group will be judged again", group=group, in_s=pause, reason=reason)
            self.paused += 1
            try:
                await anyio.sleep(pause)  # a provider that is down recovers more slowly under load
            finally:
                self.paused -= 1

    async def ask(self, build: prompt.BuildPrompt, shown: Sequence[Transcript], spent: Usage) -> ScoredReply:
        """Ask about the transcripts `shown`, of which `build` makes a prompt, until a reply can be read. If the model
        refuses a prompt as too long, the context is halved, for all later prompts too.

        Every call is added to `spent`. Raises `JudgingError` after `judge.attempts` replies that can't be read, if no
        reply comes, and for a prompt that is too long when half of the context would be less than
        `_MIN_CONTEXT_TOKENS`."""
        while True:
            tokens = self._context_tokens
            try:
                return await self._ask(build, shown, tokens, spent)
            except ContextWindowError as error:
                if tokens // 2 < _MIN_CONTEXT_TOKENS:
                    raise JudgingError(str(error)) from error
                if self._context_tokens == tokens:  # otherwise a concurrent judging has halved it already
                    self._context_tokens = tokens // 2
                    logger.warning("judge.context_tokens is more than the model takes", tokens=tokens, now=tokens // 2)

    async def try_pass(
        self, judge: Callable[[], Awaitable[Verdict]], failures: list[JudgingError], count: bool, **about: Any
    ) -> Verdict | None:
        """Return the verdict of one pass, which `judge` makes. If it fails, log that with `about`, add the error to
        `failures` and return `None`. `count`: add the pass to the statistics."""
        self.statistics.passes += count
        try:
            return await judge()
        except JudgingError as error:
            failures.append(error)
            if count:
                self.statistics.failed_judgings += 1
                self.statistics.failure = str(error)[:300]
            logger.warning("judging failed", reason=str(error)[:500], **about)
            return None

    async def _ask(
        self, build: prompt.BuildPrompt, shown: Sequence[Transcript], context_tokens: int, spent: Usage
    ) -> ScoredReply:
        """Build a prompt of at most `context_tokens` and ask until a reply can be read; each further call has a
        reminder of the form. Other arguments, and `JudgingError`, as for `ask`. Raises `ContextWindowError` if the
        model refuses the prompt as too long."""
        asked = build(self.rubric, self._rng, context_tokens)
        messages = asked.messages
        usage, latency_s = Usage(), 0.0
        for attempt in range(1, self._config.attempts + 1):
            self.statistics.asked_again += attempt > 1
            try:
                sent = attach_images(messages, shown, self._config.max_images)
                reply = await self._model(sent, asked.schema())
            except ContextWindowError:
                raise
            except ModelError as error:
                raise JudgingError(str(error)) from error
            call = Usage(1, reply.prompt_tokens, reply.completion_tokens, reply.cost_usd)
            for counted in (usage, spent, self.statistics.usage):
                counted.include(call)
            latency_s += reply.latency_s
            try:
                parsed = asked.parse(reply.text)
            except UnreadableReplyError as error:
                failure = JudgingError(f"the reply could not be read {attempt} times: {_problem(error, reply)}")
                messages = prompt.add_reminder(asked, str(error))
                continue
            return ScoredReply(asked, parsed, self._verdict(asked, reply.model, usage, latency_s))
        raise failure

    def _verdict(self, asked: prompt.Prompt, model: str, usage: Usage, latency_s: float) -> Verdict:
        """Return the verdict of a reply without its scores: which model and rubric, and what it cost."""
        named: dict[str, Any] = asdict(usage)
        return Verdict(
            judge_model=model or self._config.model,
            rubric_hash=self.rubric.hash,
            rubric=self.rubric.name,
            scores=(),
            attempts=named.pop("calls"),
            latency_s=latency_s,
            left_out=asked.left_out,
            **named,
        )


def new_backoff() -> Backoff:
    """Return the pauses between two tries."""
    return Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)


def with_failed_calls(verdicts: Sequence[Verdict], spent: Usage) -> tuple[Verdict, ...]:
    """Return the verdicts of a group with the calls that led to none added to the first one, so that all verdicts
    together cost what the group cost. `spent`: all calls about the group."""
    first, *others = verdicts
    first = msgspec.structs.replace(
        first,
        attempts=spent.calls - sum(v.attempts for v in others),
        prompt_tokens=spent.prompt_tokens - sum(v.prompt_tokens for v in others),
        completion_tokens=spent.completion_tokens - sum(v.completion_tokens for v in others),
        cost_usd=first.cost_usd + (spent.cost_usd - sum(v.cost_usd for v in verdicts)),
    )
    return (first, *others)


def _problem(error: UnreadableReplyError, reply: ModelReply) -> str:
    """Return why a reply was not read, for logs and events, without its text, which may quote a run."""
    if reply.cut_off:
        return f"{error}: it was cut off after {reply.completion_tokens} tokens (judge.request.max_tokens)"
    return f"{error}: it has {len(reply.text)} characters"
