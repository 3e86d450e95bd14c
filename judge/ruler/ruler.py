"""RULER: a judge model compares all trajectories of a group in one call and scores each of them.

A group gets `judge.passes` passes in different orders. A pass is one call, repeated until its reply could be read. The
scores of all passes are aggregated without the effect of positions (`judge.ruler.aggregation`). A pass alone has the
judge's position bias, so one that fails is tried again if only one other succeeded. A group without any pass is tried
again, with growing pauses, for `judge.retry_for_s`. The calls of failed passes count in the group's first verdict.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import anyio
import msgspec

from judge.ruler import prompt
from judge.ruler.aggregation import JudgePass, aggregate, draw_orders
from judge.ruler.asking import Asker, Judged, JudgingError, Usage, new_backoff, with_failed_calls
from judge.ruler.transcripts import Transcript
from pipeline.concurrency.concurrently import concurrently
from pipeline.events import Score, TrajectoryCompleted, Verdict

_PASS_RETRIES = 4
"""How often failed passes are tried again for the sake of a single one that succeeded."""


class LlmRuler(Asker):
    """Scores groups with one judge model and one rubric."""

    async def __call__(self, members: Sequence[TrajectoryCompleted]) -> Judged:
        """Return the score of each trajectory and the verdicts behind it.

        Raises `UnscoredError` if no judging succeeds within `judge.retry_for_s`, or a trajectory has left the log."""

        spent = Usage()

        async def judge() -> Judged:
            return await self.judge(await concurrently(self._load, members), spent=spent)

        return await self.retry(judge, members[0].group)

    async def judge(
        self, transcripts: Sequence[Transcript], *, count: bool = True, spent: Usage | None = None
    ) -> Judged:
        """Judge a group without retries, as `Asker.judge`. `spent`: the calls of earlier tries, which are added to the
        first verdict; this try's calls are added to it. Raises `JudgingError` if every pass failed."""
        spent = spent or Usage()
        by_id = {t.trajectory: t for t in transcripts}
        # The group itself seeds the orders, so that judging the same history again shows the same lists.
        rng = random.Random("/".join(sorted(by_id)))
        orders = draw_orders(sorted(by_id), self._config.passes, rng)
        verdicts: list[Verdict] = []
        failed_orders: list[list[str]] = []
        failures: list[JudgingError] = []

        async def judge_in(order: list[str]) -> None:
            """Make one pass in this order. Append its verdict to `verdicts`, or the order to `failed_orders`."""
            judge = functools.partial(self._judge_in_order, [by_id[n] for n in order], spent)
            verdict = await self.try_pass(judge, failures, count)
            if verdict is not None:
                verdicts.append(verdict)
            else:
                failed_orders.append(order)

        await concurrently(judge_in, orders)
        backoff = new_backoff()
        for _ in range(_PASS_RETRIES):
            if len(verdicts) != 1 or not failed_orders:
                break
            await anyio.sleep(backoff.next_s())  # such as for a limit of requests per second
            await judge_in(failed_orders.pop(0))  # which appends to `verdicts`, or to `failed_orders` again
        if not verdicts:
            raise failures[-1]
        passes = [JudgePass(v.order, {s.trajectory: s.score for s in v.scores}) for v in verdicts]
        if count:
            self.statistics.add(passes)
        return aggregate(passes, self.statistics.bias), with_failed_calls(verdicts, spent)

    async def _judge_in_order(self, ordered: Sequence[Transcript], spent: Usage) -> Verdict:
        """Ask the judge model about the trajectories in the order given, and return its scores as a verdict. Every
        call is added to `spent`. Raises `JudgingError`."""
        build = functools.partial(prompt.build_prompt, ordered)
        asked, parsed, verdict = await self.ask(build, ordered, spent)
        scores = tuple(
            Score(trajectory=trajectory, score=parsed.scores[drawn_id], explanation=parsed.explanations[drawn_id])
            for drawn_id, trajectory in asked.subjects.items()
        )
        return msgspec.structs.replace(verdict, scores=scores, order=tuple(asked.subjects.values()))
