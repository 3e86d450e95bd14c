"""Asks the judge model: calls until a reply can be read, within the settings' limits, and what they cost.

What a judge asks about is its own business (`judge.ruler.ruler`, `judge.next_state`); how often it asks, how long
a prompt may be, when it asks again and how that is counted is the same for all.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread
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
Args = TypeVarTuple("Args")
LoadTranscript = Callable[[TrajectoryCompleted], Awaitable[Transcript]]
Judged = tuple[dict[str, float], tuple[Verdict, ...]]
"""The score of each trajectory, and the verdicts behind it."""

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 60.0
_MIN_CONTEXT_TOKENS = 2_000
"""A prompt that is refused as too long is halved down to this."""
_LARGE = 50_000
"""Characters from which work on a text is done in a thread, so that the event loop is not blocked."""
_PARTS = 25_000
"""Characters that a message of parts counts for: an image in it is named by a hash of its bytes, which takes time."""


Failure = Literal["", "unreadable", "out_of_range", "cut_off", "no_answer", "too_long"]
"""As `JudgeMeasured.failure`."""


class JudgingError(Exception):
    """A judging gave no usable scores. The message says why."""

    def __init__(self, why: str, kind: Failure, usage: Usage | None = None) -> None:
        """`usage`: the calls that were made in vain."""
        super().__init__(why)
        self.kind, self.usage = kind, usage or Usage()


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
class Failures:
    """What of several passes failed, and what all of them took."""

    last: JudgingError
    """The last failure; at first, why there is none."""
    in_vain: Usage = field(default_factory=Usage)
    """The calls of failed passes."""
    every: Usage = field(default_factory=Usage)
    """The calls of all passes."""


@dataclass
class JudgeStatistics:
    """Counts of a judge's work so far, and how well its passes agree."""

    groups: int = 0
    passes: int = 0
    """Passes over groups, with and without scores."""
    failed_judgings: int = 0
    failure: Failure = ""
    """Why the last failed pass failed."""
    asked_again: int = 0
    usage: Usage = field(default_factory=Usage)
    agreement_sum: float = 0.0
    agreement_groups: int = 0
    bias: PositionBias = field(default_factory=PositionBias)

    @property
    def self_agreement(self) -> float | None:
        """Return the share of pairs of trajectories that two passes over a group order equally, or of calls that two
        votes score equally; `None` if there were no two yet."""
        return self.agreement_sum / self.agreement_groups if self.agreement_groups else None

    def add(self, passes: Sequence[JudgePass]) -> None:
        """Add the passes over a group."""
        self.groups += 1
        self.bias.update(passes)
        if len(passes) < 2:
            return
        if (agreement := pairwise_agreement(passes[0].scores, passes[1].scores)) is not None:
            self.agreement_sum += agreement
            self.agreement_groups += 1

    def add_votes(self, votes: Sequence[Sequence[float]]) -> None:
        """Add a run, with the votes on each of its calls."""
        self.groups += 1
        if equal := [said[0] == said[1] for said in votes if len(said) > 1]:
            self.agreement_sum += sum(equal) / len(equal)
            self.agreement_groups += 1

    @property
    def position_bias(self) -> float | None:
        """Return how much the first position adds; `None` if no position was compared yet."""
        return self.bias.first_position() if self.bias.measured else None

    def as_dict(self) -> dict[str, float | None]:
        """Return the values for reports; `None` where nothing was measured."""
        return {
            "groups": self.groups,
            **asdict(self.usage),
            "failed_judgings": self.failed_judgings,
            "asked_again": self.asked_again,
            "self_agreement": self.self_agreement,
            "position_bias": self.position_bias,
        }


class ScoredReply(NamedTuple):
    """A reply that could be read."""

    asked: prompt.Prompt
    parsed: replies.ParsedScores
    verdict: Verdict
    """With everything but the scores."""


async def no_log(run: TrajectoryCompleted) -> Transcript:
    """Stand for the log where a judge is shown transcripts only."""
    raise LookupError(run.trajectory)


class Asker(ABC):
    """Asks one judge model with one rubric. What is asked is its subclasses'."""

    def __init__(
        self,
        config: JudgeConfig,
        rubric: Rubric,
        model: ChatModel,
        load: LoadTranscript = no_log,
        *,
        rng: random.Random | None = None,
    ) -> None:
        """`load` returns the transcript of a run. `rng` draws nonces and ids, which nobody may be able to guess; the
        default is the system's."""
        self._config, self.rubric, self._model, self._load = config, rubric, model, load
        self._turns = anyio.CapacityLimiter(config.concurrency)
        self._rng = rng or random.SystemRandom()
        self._context_tokens = config.context_tokens
        self.statistics = JudgeStatistics()
        self.paused = 0
        """Groups or runs that pause before they are judged again."""

    @abstractmethod
    async def judge(self, transcripts: Sequence[Transcript], *, count: bool = True) -> Judged:
        """Judge runs without retries. `count`: add them to the statistics. Raises `JudgingError`."""

    async def retry(self, work: Callable[[], Awaitable[T]], group: str) -> tuple[T, Usage]:
        """Return the result of `work`, and the calls that were made in vain before. `group` is for the log.

        Raises `UnscoredError` if it fails with `JudgingError` for `judge.retry_for_s`, or a trajectory has left the
        log."""
        began = time.monotonic()
        deadline = began + self._config.retry_for_s
        backoff, in_vain = new_backoff(), Usage()
        while True:
            async with self._turns:
                try:
                    return await work(), in_vain
                except HistoryGoneError as error:
                    raise UnscoredError(str(error)) from error
                except JudgingError as error:
                    reason = str(error)
                    in_vain.include(error.usage)
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
        """Ask once about `shown`, which `build` makes a prompt of. A context that proves too long is halved.

        Every call is added to `spent`. Raises `JudgingError` after `judge.attempts` replies that can't be read, where
        no reply comes, and for a prompt that is too long even when it is halved."""
        while True:
            tokens = self._context_tokens
            try:
                return await self._ask(build, shown, tokens, spent)
            except ContextWindowError as error:
                if tokens // 2 < _MIN_CONTEXT_TOKENS:
                    raise JudgingError(str(error), "too_long") from error
                if self._context_tokens == tokens:  # otherwise a concurrent judging has halved it already
                    self._context_tokens = tokens // 2
                    logger.warning("judge.context_tokens is more than the model takes", tokens=tokens, now=tokens // 2)

    async def try_pass(
        self, judge: Callable[[Usage], Awaitable[Verdict]], failures: Failures, count: bool, **about: Any
    ) -> Verdict | None:
        """Return the verdict of one pass; `None` if it fails, which is added to `failures` and logged with `about`.
        `judge` adds its calls to the usage that it gets. `count`: add the pass to the statistics."""
        spent = Usage()
        self.statistics.passes += count
        try:
            return await judge(spent)
        except JudgingError as error:
            failures.last = error
            failures.in_vain.include(spent)
            if count:
                self.statistics.failed_judgings += 1
                self.statistics.failure = error.kind
            logger.warning("judging failed", reason=str(error)[:500], **about)
            return None
        finally:
            failures.every.include(spent)

    async def _ask(
        self, build: prompt.BuildPrompt, shown: Sequence[Transcript], context_tokens: int, spent: Usage
    ) -> ScoredReply:
        """Ask until a reply could be read.

        Raises `JudgingError` after `judge.attempts` calls, `ContextWindowError` if the prompt is too long."""
        asked = await _in_thread_if_large(_characters(shown), build, self.rubric, self._rng, context_tokens)
        messages = asked.messages
        usage, latency_s = Usage(), 0.0
        failure = JudgingError("judge.attempts is 0", "")
        for attempt in range(self._config.attempts):
            self.statistics.asked_again += attempt > 0
            try:
                sent = await _in_thread_if_large(
                    _characters(shown), attach_images, messages, shown, self._config.max_images
                )
                reply = await self._model(sent, asked.schema())
            except ContextWindowError:
                raise
            except ModelError as error:
                raise JudgingError(str(error), "no_answer") from error
            call = Usage(1, reply.prompt_tokens, reply.completion_tokens, reply.cost_usd)
            for counted in (usage, spent, self.statistics.usage):
                counted.include(call)
            latency_s += reply.latency_s
            try:
                parsed = await _in_thread_if_large(len(reply.text), asked.parse, reply.text)
            except UnreadableReplyError as error:
                failure = JudgingError(
                    f"the reply could not be read {attempt + 1} times: {_problem(error, reply)}",
                    "cut_off" if reply.cut_off else error.kind,
                )
                messages = prompt.add_reminder(asked, out_of_range=error.kind == "out_of_range")
                continue
            return ScoredReply(asked, parsed, self._verdict(asked, reply.model, usage, latency_s))
        raise failure

    def _verdict(self, asked: prompt.Prompt, model: str, usage: Usage, latency_s: float) -> Verdict:
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


def charged(verdicts: Sequence[Verdict], usage: Usage) -> tuple[Verdict, ...]:
    """Return the verdicts of a group, with calls that were made in vain added to the first."""
    first = verdicts[0]
    with_all = msgspec.structs.replace(
        first,
        attempts=first.attempts + usage.calls,
        prompt_tokens=first.prompt_tokens + usage.prompt_tokens,
        completion_tokens=first.completion_tokens + usage.completion_tokens,
        cost_usd=first.cost_usd + usage.cost_usd,
    )
    return (with_all, *verdicts[1:])


def _characters(transcripts: Sequence[Transcript]) -> int:
    """Estimate how much text there is, without rendering it."""
    return sum(
        len(content) if isinstance(content := m.get("content"), str) else _PARTS
        for t in transcripts
        for c in t.conversations
        for m in c.messages
    )


async def _in_thread_if_large(characters: int, work: Callable[[*Args], T], *args: *Args) -> T:
    """Return `work(*args)`, computed in a thread if there are many characters to work on."""
    if characters < _LARGE:
        return work(*args)
    return await anyio.to_thread.run_sync(work, *args)


def _problem(error: UnreadableReplyError, reply: ModelReply) -> str:
    """Say why a reply was not read, without its text: a judge quotes what it read."""
    if reply.cut_off:
        return f"{error}: it was cut off after {reply.completion_tokens} tokens (judge.request.max_tokens)"
    return f"{error}: it has {len(reply.text)} characters"
