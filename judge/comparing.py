"""Compares two answers to the same call with the judge model, in both orders: an outside model's and a policy's.

Shadow calls are compared here as they come (`rollout.shadow`); `judge.healing` compares corrections."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from judge.errors import UnscoredError
from judge.limits import Budget
from judge.models.judge_model import open_judge_model
from judge.ruler.rubrics import load_rubric
from judge.ruler.ruler import LlmRuler
from judge.ruler.transcripts import Transcript, from_exchanges
from pipeline.concurrency.concurrently import concurrently
from pipeline.config import Config
from pipeline.events import AnswersCompared, ExchangeRecorded, ShadowAnswered
from pipeline.log.broker import Broker, Consumption, Delivery, HistoryGoneError
from pipeline.log.consumer import handling
from pipeline.telemetry.logs import get_logger

logger = get_logger("judge.comparing")

_WRONG_EVENT_DELAY_S = 1.0


class AnswerJudge:
    """Compares answers with one judge model."""

    def __init__(self, ruler: LlmRuler) -> None:
        """`ruler` makes two passes."""
        self._ruler = ruler

    async def compare(
        self, call: ExchangeRecorded, model: str, outside: str, outside_response: bytes, apprentice_response: bytes
    ) -> AnswersCompared:
        """Score the answers of the model `outside` and of the policy `model` to a call: two chat completions. Raises
        `UnscoredError` if the judge can't be had, and `HistoryGoneError` if the call has no messages."""
        shown: list[Transcript] = []
        for role, response in (("outside", outside_response), ("apprentice", apprentice_response)):
            answered = msgspec.structs.replace(call, response=response, status="complete", side_call=False)
            shown.append(from_exchanges(role, [answered]))
        judging = partial(self._ruler.judge, shown, count=False)
        (scores, verdicts), _ = await self._ruler.retry(judging, call.trajectory)
        return AnswersCompared(
            project=call.project,
            trajectory=call.trajectory,
            call=call.seq,
            model=model,
            outside=outside,
            outside_score=scores["outside"],
            apprentice_score=scores["apprentice"],
            verdicts=verdicts,
        )


@asynccontextmanager
async def open_answer_judge(config: Config) -> AsyncIterator[AnswerJudge | None]:
    """Open the judge model for comparisons; `None` if there is none, or nothing to compare. Raises `ConfigError`."""
    shadowed = any(table.shadow_percent for table in config.outside)
    if not config.judge.model or not (shadowed or config.judge.healing.outside):
        yield None
        return

    # A pass alone would have the judge's position bias.
    judge = msgspec.structs.replace(config.judge, passes=2)
    async with open_judge_model(judge) as model:
        yield AnswerJudge(LlmRuler(judge, load_rubric(judge.rubric), model))


class ShadowJudge:
    """Compares the answers of shadow calls. Any number of processes may run one."""

    def __init__(self, broker: Broker, config: Config, judge: AnswerJudge | None) -> None:
        """Without a `judge`, shadow calls are acknowledged and not compared."""
        self._broker, self._judge, self._at_once = broker, judge, config.judge.concurrency
        self._budget = Budget(broker, config)

    async def run(self, arrivals: Consumption) -> None:
        """Consume until cancelled."""
        while True:
            await concurrently(self._on_arrival, await arrivals.batch(self._at_once))

    async def _on_arrival(self, delivery: Delivery) -> None:
        with handling([delivery]):
            if not isinstance(delivery.event, ShadowAnswered):
                await delivery.give_back(_WRONG_EVENT_DELAY_S)
                return
            await self._compare(delivery.event)
            await delivery.ack()

    async def _compare(self, shadow: ShadowAnswered) -> None:
        if self._judge is None or shadow.same or await self._budget.refusal(f"{shadow.trajectory}/{shadow.call}"):
            return
        names: dict[str, Any] = {"project": shadow.project, "trajectory": shadow.trajectory}
        try:
            history = await self._broker.read(ExchangeRecorded, **names)
            call = next((r.event for r in history if (r.event.seq, r.event.choice) == (shadow.call, 0)), None)
            if call is None or await self._broker.read_last(AnswersCompared, **names, call=shadow.call) is not None:
                return
            compared = await self._judge.compare(call, shadow.model, shadow.outside, call.response, shadow.response)
        except (HistoryGoneError, UnscoredError) as error:
            logger.error("shadow call not compared", reason=str(error)[:500], call=shadow.call, **names)
            return
        await self._broker.publish(compared)
