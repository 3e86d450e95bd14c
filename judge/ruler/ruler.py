"""RULER: one model call compares all trajectories of a group; here with ids, orders and retries that can be trusted.

A judging is one pass over the group in one order: a call for each subset that fits the judge's context, asked again
until every score could be read. A group gets up to `judgings` of them, and its scores are merged without the effect of
places (`judge.ruler.aggregation`). A judging that fails is recorded in the log; a group that has none is tried again later, with
growing pauses, until `retry_for_s` is over.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

from judge.models.chat import ChatModel, ContextWindowError, ModelError, ModelReply
from judge.ruler import prompt, replies
from judge.ruler.aggregation import Judging, PositionBias, agree, concordance, merge, orders
from judge.ruler.budget import pieces
from judge.ruler.rubrics import Rubric
from judge.ruler.transcripts import Transcript
from judge.scoring import UnscoredError
from pipeline.config import JudgeConfig
from pipeline.events import Score, TrajectoryCompleted, Verdict
from pipeline.log.broker import HistoryGoneError
from pipeline.telemetry.logs import get_logger

log = get_logger("judge.ruler.ruler")

T = TypeVar("T")
Args = TypeVarTuple("Args")
Load = Callable[[TrajectoryCompleted], Awaitable[Transcript]]

_SMALLEST_SUBSET = 4
_SHARED = 2
"""Trajectories that neighbouring subsets have in common."""
_LONGEST_PAUSE_S = 60.0
_LEAST_CONTEXT = 2_000
"""Tokens of a prompt below which a judge model's context is not tried any more."""
_LARGE = 50_000
"""Characters of a reply, or bytes of trajectories, that are worked on in a thread, so that nothing else has to wait."""
_QUOTED = 4_000
"""Characters of a reply that are sent back where the rest of its scores is asked for."""


_INCOMPLETE = "Some scores were missing or contradicted each other."


class JudgingError(Exception):
    """A judging that gave no usable scores."""


@dataclass
class Measured:
    """What a judge did so far."""

    groups: int = 0
    calls: int = 0
    failed_judgings: int = 0
    asked_again: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    agreement_sum: float = 0.0
    agreement_groups: int = 0
    bias: PositionBias = field(default_factory=PositionBias)

    @property
    def self_agreement(self) -> float:
        """Share of pairs that two judgings of a group put into the same order; 1 before there were any."""
        return self.agreement_sum / self.agreement_groups if self.agreement_groups else 1.0

    def as_dict(self) -> dict[str, float]:
        return {
            "groups": self.groups,
            "calls": self.calls,
            "failed_judgings": self.failed_judgings,
            "asked_again": self.asked_again,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cost_usd": self.cost_usd,
            "self_agreement": self.self_agreement,
            "position_bias": self.bias.first_place(),
        }


class LlmRuler:
    """Scores groups with one judge model and one rubric."""

    def __init__(
        self,
        config: JudgeConfig,
        rubric: Rubric,
        model: ChatModel,
        load: Load,
        *,
        rng: random.Random | None = None,
    ) -> None:
        """`rng` draws nonces and ids, which no one may guess."""
        self._config, self.rubric, self._model, self._load = config, rubric, model, load
        self._groups = anyio.CapacityLimiter(config.concurrency)
        self._rng = rng or random.SystemRandom()
        self._context_tokens = config.context_tokens
        self.measured = Measured()

    async def __call__(
        self, members: Sequence[TrajectoryCompleted]
    ) -> tuple[dict[str, float], tuple[Verdict, ...]]:
        """Score by trajectory and the verdicts behind it. Raises `UnscoredError` once the time for retries is over."""
        deadline = time.monotonic() + self._config.retry_for_s
        pause = 0.5
        while True:
            async with self._groups:
                try:
                    return await self.judge(await self._transcripts(members))
                except HistoryGoneError as error:
                    raise UnscoredError(str(error)) from error
                except JudgingError as error:
                    reason = str(error)
            if time.monotonic() + pause > deadline:
                raise UnscoredError(f"no usable judging within {self._config.retry_for_s:.0f} s: {reason}")
            log.warning("judged again later", group=members[0].group, in_s=pause, reason=reason)
            await anyio.sleep(pause)  # a provider that is down is not helped by haste
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def _transcripts(self, members: Sequence[TrajectoryCompleted]) -> list[Transcript]:
        found: dict[str, Transcript] = {}

        async def one(member: TrajectoryCompleted) -> None:
            found[member.trajectory] = await self._load(member)

        try:
            async with anyio.create_task_group() as tg:
                for member in members:
                    tg.start_soon(one, member)
        except* HistoryGoneError as group:
            raise HistoryGoneError(_first(group).what) from None
        return [found[m.trajectory] for m in members]

    async def judge(
        self, transcripts: Sequence[Transcript], *, measure: bool = True
    ) -> tuple[dict[str, float], tuple[Verdict, ...]]:
        """Judge once. Raises `JudgingError` where no judging gave scores. `measure`: let it count in `measured`."""
        by_id = {t.trajectory: t for t in transcripts}
        # The order is drawn from the group, so that judging the same history again shows the same lists.
        drawn = orders(sorted(by_id), self._config.passes, random.Random("/".join(sorted(by_id))))
        done: list[tuple[Judging, ...]] = []
        verdicts: list[Verdict] = []
        failures: list[str] = []

        async def one(order: list[str]) -> None:
            try:
                judgings, said = await self._pass([by_id[n] for n in order])
            except JudgingError as error:
                self.measured.failed_judgings += 1
                failures.append(str(error))
                log.warning("judging failed", reason=str(error)[:500])
                return
            done.append(judgings)
            verdicts.extend(said)

        async with anyio.create_task_group() as tg:
            for order in drawn[:2]:
                tg.start_soon(one, order)
        for order in drawn[2:]:
            whole = [j[0] for j in done if len(j) == 1]
            if len(whole) >= 2 and agree(whole, self._config.agreement, self.measured.bias):
                break
            await one(order)
        if not done:
            raise JudgingError(failures[-1] if failures else "no judging was made")
        if measure:
            self._measure(done)
        return merge([j for judgings in done for j in judgings], self.measured.bias), tuple(verdicts)

    def recall(self, verdicts: Sequence[Verdict]) -> None:
        """Learn from a group that an earlier life of this judge scored, so that a restart does not forget the bias."""
        own = [v for v in verdicts if v.rubric_hash == self.rubric.hash]
        judgings = [Judging(v.order, {s.trajectory: s.score for s in v.scores}) for v in own]
        # Subsets of a long group hold different trajectories: only whole judgings say something about places.
        if judgings and all(set(j.order) == set(judgings[0].order) == j.scores.keys() for j in judgings):
            self._measure([(j,) for j in judgings])

    def _measure(self, done: Sequence[tuple[Judging, ...]]) -> None:
        self.measured.groups += 1
        whole = [j[0] for j in done if len(j) == 1]
        self.measured.bias.learn(whole)
        if len(whole) >= 2 and (same := concordance(whole[0].scores, whole[1].scores)) is not None:
            self.measured.agreement_sum += same
            self.measured.agreement_groups += 1

    async def _pass(self, ordered: Sequence[Transcript]) -> tuple[tuple[Judging, ...], list[Verdict]]:
        """One judging in this order: one call, or one for each subset."""
        while True:
            tokens = self._context_tokens
            try:
                return await self._pass_within(ordered, tokens)
            except ContextWindowError as error:
                smaller = tokens // 2
                if smaller < _LEAST_CONTEXT:
                    raise JudgingError(str(error)) from error
                if self._context_tokens == tokens:  # of several judgings at once, one is enough to learn it
                    self._context_tokens = smaller
                    log.warning(
                        "judge.context_tokens is more than the judge model takes", tokens=tokens, now=smaller
                    )

    async def _pass_within(
        self, ordered: Sequence[Transcript], tokens: int
    ) -> tuple[tuple[Judging, ...], list[Verdict]]:
        room = prompt.room(self.rubric, len(ordered), tokens)
        sizes = await _off_loop(_characters(ordered), prompt.measure, ordered)
        judgings, verdicts = [], []
        for piece in pieces(sizes.members, sizes.context, room, _SMALLEST_SUBSET, _SHARED):
            verdict = await self._call([ordered[i] for i in piece], room)
            judgings.append(Judging(verdict.order, {s.trajectory: s.score for s in verdict.scores}))
            verdicts.append(verdict)
        return tuple(judgings), verdicts

    async def _call(self, subset: Sequence[Transcript], room: int) -> Verdict:
        """Ask until every score could be read. Raises `JudgingError` after `attempts` calls, `ContextWindowError` where the
        prompt is too long for the model."""
        spent = _Spent()
        characters = _characters(subset)
        asked = await _off_loop(characters, prompt.build, self.rubric, subset, self._rng, room)
        messages, wanted = list(asked.messages), list(asked.names)
        scores: dict[str, float] = {}
        why: dict[str, str] = {}
        problem = "no call was made"
        for attempt in range(self._config.attempts):
            self.measured.asked_again += attempt > 0
            try:
                reply = await self._model(messages, prompt.answer_schema(wanted))
            except ContextWindowError:
                raise
            except ModelError as error:
                raise JudgingError(str(error)) from error
            spent.add(
                reply.model, reply.prompt_tokens, reply.completion_tokens, reply.cost_usd, reply.latency_s
            )
            self._account(reply.prompt_tokens, reply.completion_tokens, reply.cost_usd)
            got = await _off_loop(len(reply.text), replies.parse_scores, reply.text, wanted)
            if not got.missing:
                scores |= got.scores
                why |= got.explanations
                return self._verdict(asked, scores, why, spent)
            problem = f"{len(got.missing)} of {len(subset)} scores could not be read: {_excerpt(reply)}"
            if got.scores or got.out_of_range:
                scores |= got.scores
                why |= got.explanations
                wanted = list(got.missing)
                fault = "Scores have to be from 0 to 1." if got.out_of_range else _INCOMPLETE
                quoted = {"role": "assistant", "content": reply.text.strip()[:_QUOTED]}
                messages = [*asked.messages, quoted, prompt.ask_again(wanted, fault)]
            else:  # nothing to build on
                asked = await _off_loop(characters, prompt.build, self.rubric, subset, self._rng, room)
                messages, wanted = list(asked.messages), list(asked.names)
                scores, why = {}, {}
        raise JudgingError(f"after {self._config.attempts} calls, {problem}")

    def _account(self, prompt_tokens: int, completion_tokens: int, cost_usd: float) -> None:
        self.measured.calls += 1
        self.measured.prompt_tokens += prompt_tokens
        self.measured.completion_tokens += completion_tokens
        self.measured.cost_usd += cost_usd

    def _verdict(
        self, asked: prompt.Prompt, scores: dict[str, float], why: dict[str, str], spent: _Spent
    ) -> Verdict:
        return Verdict(
            judge_model=spent.model or self._config.model,
            rubric_hash=self.rubric.hash,
            rubric=self.rubric.name,
            scores=tuple(
                Score(trajectory=t, score=scores[i], explanation=why[i]) for i, t in asked.names.items()
            ),
            order=tuple(asked.names.values()),
            prompt_tokens=spent.prompt_tokens,
            completion_tokens=spent.completion_tokens,
            cost_usd=spent.cost_usd,
            latency_s=spent.latency_s,
            attempts=spent.calls,
            left_out=asked.left_out,
        )


@dataclass
class _Spent:
    model: str = ""
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    latency_s: float = 0.0

    def add(
        self, model: str, prompt_tokens: int, completion_tokens: int, cost_usd: float, latency_s: float
    ) -> None:
        self.model = model
        self.calls += 1
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        self.cost_usd += cost_usd
        self.latency_s += latency_s


def _first(group: BaseExceptionGroup[HistoryGoneError]) -> HistoryGoneError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, HistoryGoneError)
    return error


def _characters(transcripts: Sequence[Transcript]) -> int:
    """About how much text there is, told without rendering it."""
    return sum(
        len(content) if isinstance(content := m.get("content"), str) else 100
        for t in transcripts
        for c in t.parts()
        for m in c.messages
    )


async def _off_loop(characters: int, work: Callable[[*Args], T], *args: *Args) -> T:
    """`work(*args)`, in a thread where there is much to do."""
    if characters < _LARGE:
        return work(*args)
    return await anyio.to_thread.run_sync(work, *args)


def _excerpt(reply: ModelReply) -> str:
    if reply.cut_off:
        return f"the reply was cut off after {reply.completion_tokens} tokens (judge.request.max_tokens): {reply.text.strip()[:200]!r}"
    return repr(reply.text.strip()[:200])
