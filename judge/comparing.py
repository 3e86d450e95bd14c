"""Compares two answers to the same call with the judge model, in both orders: an outside model's and a policy's.

An outside model is a provider's model behind the gateway; its apprentice is the policy that learns to replace it. A
shadow call asks the apprentice what an agent asked the outside model, and puts the answer on the log
(`rollout.shadow`). `ShadowJudge`, which the judge service runs, compares these answers as they come. `judge.healing`
compares an outside model's correction with what the policy said."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from judge.errors import UnscoredError
from judge.group_log import WRONG_EVENT_DELAY_S
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


async def compare_answers(
    ruler: LlmRuler, call: ExchangeRecorded, model: str, outside: str, outside_answer: bytes, policy_answer: bytes
) -> AnswersCompared:
    """Have the judge model score two answers to one call, and return the scores as an event. `outside` and `model`: the
    names of the outside model and of the policy; their answers are chat completions. Raises `UnscoredError` if the
    judge model gives no scores, and `HistoryGoneError` if the call has no messages."""
    answers: list[Transcript] = []
    for role, response in (("outside", outside_answer), ("apprentice", policy_answer)):
        answered_call = msgspec.structs.replace(call, response=response, status="complete", side_call=False)
        answers.append(from_exchanges(role, [answered_call]))
    scores, verdicts = await ruler.retry(partial(ruler.judge, answers, count=False), call.trajectory)
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


async def open_answer_ruler(config: Config) -> LlmRuler | None:
    """Return the ruler for comparisons of answers; `None` if there is no judge model, or nothing to compare. Raises
    `ConfigError`."""
    shadowed = any(table.shadow_percent for table in config.outside)
    if not config.judge.model or not (shadowed or config.judge.healing.outside):
        return None
    # A pass alone would have the judge's position bias.
    judge = msgspec.structs.replace(config.judge, passes=2)
    return LlmRuler(judge, load_rubric(judge.rubric), await open_judge_model(judge))


class ShadowJudge:
    """Compares the answers of shadow calls. Any number of processes may run one."""

    def __init__(self, broker: Broker, config: Config, ruler: LlmRuler | None) -> None:
        """`ruler`: of `open_answer_ruler`. Without one, shadow calls are acknowledged and not compared."""
        self._broker, self._ruler, self._at_once = broker, ruler, config.judge.concurrency
        self._budget = Budget(broker, config)

    async def run(self, arrivals: Consumption) -> None:
        """Consume `rollout.shadow` until cancelled."""
        while True:
            await concurrently(self._on_arrival, await arrivals.batch(self._at_once))

    async def _on_arrival(self, delivery: Delivery) -> None:
        """Compare one shadow call and acknowledge it. Raises `BrokerError`, after which it is delivered again."""
        with handling([delivery]):
            if not isinstance(delivery.event, ShadowAnswered):
                await delivery.give_back(WRONG_EVENT_DELAY_S)
                return
            await self._compare(delivery.event)
            await delivery.ack()

    async def _compare(self, shadow: ShadowAnswered) -> None:
        """Publish the comparison of a shadow call, unless it is on the log already. A call is not compared if both
        answers are the same, learning is over budget, there is no judge model, or the log lost the outside model's
        answer."""
        if self._ruler is None or shadow.same or await self._budget.refusal(f"{shadow.trajectory}/{shadow.call}"):
            return
        names: dict[str, Any] = {"project": shadow.project, "trajectory": shadow.trajectory}
        try:
            history = await self._broker.read(ExchangeRecorded, **names)
            call = next((r.event for r in history if (r.event.seq, r.event.choice) == (shadow.call, 0)), None)
            if call is None or await self._broker.read_last(AnswersCompared, **names, call=shadow.call) is not None:
                return
            answers = call.response, shadow.response
            compared = await compare_answers(self._ruler, call, shadow.model, shadow.outside, *answers)
        except (HistoryGoneError, UnscoredError) as error:
            logger.error("shadow call not compared", reason=str(error)[:500], call=shadow.call, **names)
            return
        await self._broker.publish(compared)
