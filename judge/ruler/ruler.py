"""RULER: a judge model compares all trajectories of a group in one call and scores each of them.

A group gets `judge.passes` passes in different orders. A pass is one call, repeated until its reply could be read. The
scores of all passes are aggregated without the effect of positions (`judge.ruler.aggregation`). A pass alone has the
judge's position bias, so one that fails is tried again if only one other succeeded. A group without any pass is tried
again, with growing pauses, for `judge.retry_for_s`. The calls of failed passes count in the group's first verdict.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread
import msgspec

from judge.models.chat import ChatModel, ContextWindowError, ModelError, ModelReply
from judge.ruler import prompt, replies
from judge.ruler.aggregation import (
    JudgePass,
    PositionBias,
    aggregate,
    draw_orders,
    pairwise_agreement,
)
from judge.ruler.replies import UnreadableReplyError
from judge.ruler.rubrics import Rubric
from judge.ruler.transcripts import Transcript
from judge.scoring import UnscoredError
from pipeline.backoff import Backoff
from pipeline.config import JudgeConfig
from pipeline.events import Score, TrajectoryCompleted, Verdict
from pipeline.gather import gather
from pipeline.log.broker import HistoryGoneError
from pipeline.telemetry.logs import get_logger

log = get_logger("judge.ruler.ruler")

T = TypeVar("T")
Args = TypeVarTuple("Args")
LoadTranscript = Callable[[TrajectoryCompleted], Awaitable[Transcript]]

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 60.0
_PASS_RETRIES = 4
"""How often failed passes are tried again for the sake of a single one that succeeded."""
_MIN_CONTEXT_TOKENS = 2_000
"""A prompt that is refused as too long is halved down to this."""
_LARGE = 50_000
"""Characters from which work on a text is done in a thread, so that the event loop is not blocked."""


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

    def add(self, reply: ModelReply) -> None:
        self.calls += 1
        self.prompt_tokens += reply.prompt_tokens
        self.completion_tokens += reply.completion_tokens
        self.cost_usd += reply.cost_usd

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
    failure: Failure = ""
    """Why the last failed pass failed."""
    asked_again: int = 0
    usage: Usage = field(default_factory=Usage)
    agreement_sum: float = 0.0
    agreement_groups: int = 0
    bias: PositionBias = field(default_factory=PositionBias)

    @property
    def self_agreement(self) -> float:
        """Return the share of pairs of trajectories that two passes over a group order equally; 1 if there were no two
        passes yet."""
        return self.agreement_sum / self.agreement_groups if self.agreement_groups else 1.0

    def add(self, passes: Sequence[JudgePass]) -> None:
        """Add the passes over a group."""
        self.groups += 1
        self.bias.update(passes)
        if len(passes) < 2:
            return
        if (agreement := pairwise_agreement(passes[0].scores, passes[1].scores)) is not None:
            self.agreement_sum += agreement
            self.agreement_groups += 1

    def as_dict(self) -> dict[str, float]:
        """Return the values for reports."""
        return {
            "groups": self.groups,
            **asdict(self.usage),
            "failed_judgings": self.failed_judgings,
            "asked_again": self.asked_again,
            "self_agreement": self.self_agreement,
            "position_bias": self.bias.first_position(),
        }


class LlmRuler:
    """Scores groups with one judge model and one rubric."""

    def __init__(
        self,
        config: JudgeConfig,
        rubric: Rubric,
        model: ChatModel,
        load: LoadTranscript,
        *,
        rng: random.Random | None = None,
    ) -> None:
        """`rng` draws nonces and ids, which nobody may be able to guess; the default is the system's."""
        self._config, self.rubric, self._model, self._load = config, rubric, model, load
        self._groups = anyio.CapacityLimiter(config.concurrency)
        self._rng = rng or random.SystemRandom()
        self._context_tokens = config.context_tokens
        self.statistics = JudgeStatistics()
        self.paused = 0
        """Groups that pause before they are judged again."""

    async def __call__(
        self, members: Sequence[TrajectoryCompleted]
    ) -> tuple[dict[str, float], tuple[Verdict, ...]]:
        """Return the score of each trajectory and the verdicts behind it.

        Raises `UnscoredError` if no judging succeeds within `judge.retry_for_s`, or a trajectory has left the log."""
        deadline = time.monotonic() + self._config.retry_for_s
        backoff, in_vain = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S), Usage()
        while True:
            async with self._groups:
                try:
                    scores, verdicts = await self.judge(await gather(self._load, members))
                    return scores, _charged(verdicts, in_vain)
                except HistoryGoneError as error:
                    raise UnscoredError(str(error)) from error
                except JudgingError as error:
                    reason = str(error)
                    in_vain.include(error.usage)
            pause = backoff.next_s()
            if time.monotonic() + pause > deadline:
                raise UnscoredError(f"no usable judge pass within {self._config.retry_for_s:.0f} s: {reason}")
            log.warning("group will be judged again", group=members[0].group, in_s=pause, reason=reason)
            self.paused += 1
            try:
                await anyio.sleep(pause)  # a provider that is down recovers more slowly under load
            finally:
                self.paused -= 1

    async def judge(
        self, transcripts: Sequence[Transcript], *, count: bool = True
    ) -> tuple[dict[str, float], tuple[Verdict, ...]]:
        """Judge a group without retries. `count`: add it to the statistics. Raises `JudgingError` if every judging
        failed."""
        by_id = {t.trajectory: t for t in transcripts}
        # The group itself seeds the orders, so that judging the same history again shows the same lists.
        rng = random.Random("/".join(sorted(by_id)))
        orders = draw_orders(sorted(by_id), self._config.passes, rng)
        verdicts: list[Verdict] = []
        failed: list[list[str]] = []
        in_vain, failure = Usage(), JudgingError("judge.passes is 0", "")

        async def judge_in(order: list[str]) -> None:
            nonlocal failure
            spent = Usage()
            self.statistics.passes += count
            try:
                verdicts.append(await self._judge_in_order([by_id[n] for n in order], spent))
            except JudgingError as error:
                failure = error
                failed.append(order)
                in_vain.include(spent)
                if count:
                    self.statistics.failed_judgings += 1
                    self.statistics.failure = error.kind
                log.warning("judging failed", reason=str(error)[:500])

        await gather(judge_in, orders)
        retries, backoff = iter(range(_PASS_RETRIES)), Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        while len(verdicts) == 1 and failed and next(retries, None) is not None:
            await anyio.sleep(backoff.next_s())  # such as for a limit of requests per second
            await judge_in(failed.pop(0))
        if not verdicts:
            raise JudgingError(str(failure), failure.kind, in_vain)
        passes = [_pass_of(v) for v in verdicts]
        if count:
            self.statistics.add(passes)
        return aggregate(passes, self.statistics.bias), _charged(verdicts, in_vain)

    def learn(self, verdicts: Sequence[Verdict]) -> None:
        """Add a group that an earlier process of this judge scored, so that a restart keeps the estimate of position
        bias."""
        if passes := [_pass_of(v) for v in verdicts if v.rubric_hash == self.rubric.hash]:
            self.statistics.add(passes)

    async def _judge_in_order(self, ordered: Sequence[Transcript], spent: Usage) -> Verdict:
        """Judge once, in the order given. A context that proves too long is halved. Every call is added to `spent`."""
        while True:
            tokens = self._context_tokens
            try:
                return await self._ask(ordered, tokens, spent)
            except ContextWindowError as error:
                if tokens // 2 < _MIN_CONTEXT_TOKENS:
                    raise JudgingError(str(error), "too_long") from error
                if self._context_tokens == tokens:  # otherwise a concurrent judging has halved it already
                    self._context_tokens = tokens // 2
                    log.warning(
                        "judge.context_tokens is more than the model takes", tokens=tokens, now=tokens // 2
                    )

    async def _ask(self, ordered: Sequence[Transcript], context_tokens: int, spent: Usage) -> Verdict:
        """Ask until a reply could be read.

        Raises `JudgingError` after `judge.attempts` calls, `ContextWindowError` if the prompt is too long."""
        asked = await _in_thread_if_large(
            _characters(ordered), prompt.build_prompt, self.rubric, ordered, self._rng, context_tokens
        )
        names, messages = list(asked.names), asked.messages
        usage, latency_s = Usage(), 0.0
        failure = JudgingError("judge.attempts is 0", "")
        for attempt in range(self._config.attempts):
            self.statistics.asked_again += attempt > 0
            try:
                reply = await self._model(messages, prompt.answer_schema(names, asked.score_key))
            except ContextWindowError:
                raise
            except ModelError as error:
                raise JudgingError(str(error), "no_answer") from error
            for counted in (usage, spent, self.statistics.usage):
                counted.add(reply)
            latency_s += reply.latency_s
            try:
                parsed = await _in_thread_if_large(
                    len(reply.text), replies.parse_scores, reply.text, names, asked.score_key
                )
            except UnreadableReplyError as error:
                failure = JudgingError(
                    f"the reply could not be read {attempt + 1} times: {_problem(error, reply)}",
                    "cut_off" if reply.cut_off else error.kind,
                )
                messages = prompt.add_reminder(asked.messages, out_of_range=error.kind == "out_of_range")
                continue
            return self._verdict(asked, parsed, reply.model, usage, latency_s)
        raise failure

    def _verdict(
        self,
        asked: prompt.Prompt,
        parsed: replies.ParsedScores,
        model: str,
        usage: Usage,
        latency_s: float,
    ) -> Verdict:
        named: dict[str, Any] = asdict(usage)
        return Verdict(
            judge_model=model or self._config.model,
            rubric_hash=self.rubric.hash,
            rubric=self.rubric.name,
            scores=tuple(
                Score(trajectory=trajectory, score=parsed.scores[name], explanation=parsed.explanations[name])
                for name, trajectory in asked.names.items()
            ),
            order=tuple(asked.names.values()),
            attempts=named.pop("calls"),
            latency_s=latency_s,
            left_out=asked.left_out,
            **named,
        )


def _charged(verdicts: Sequence[Verdict], usage: Usage) -> tuple[Verdict, ...]:
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


def _pass_of(verdict: Verdict) -> JudgePass:
    return JudgePass(verdict.order, {s.trajectory: s.score for s in verdict.scores})


def _characters(transcripts: Sequence[Transcript]) -> int:
    """Estimate how much text there is, without rendering it."""
    return sum(
        len(content) if isinstance(content := m.get("content"), str) else 100
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
    excerpt = repr(reply.text.strip()[:200])
    if reply.cut_off:
        excerpt = f"the reply was cut off after {reply.completion_tokens} tokens (judge.request.max_tokens): {excerpt}"
    return f"{error}: {excerpt}"
