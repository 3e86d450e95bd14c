"""Whether the judge can still be trusted: what it measured of itself, and its agreement with groups of known rewards.

A judge that drifts trains the policy towards its own error, and its scores rise while it does. So a set of anchor
groups with known rewards is judged again and again; a Kendall tau below the bound is an alarm. Everything stands in
`judge.json` in the run directory, for whoever watches the run, and goes to the log as `group.measured`, so that it can be
asked for with SQL beside what was trained meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec

from judge.commands.labelled import LabelledGroup, agreement
from judge.ruler.ruler import JudgingError, LlmRuler
from pipeline.config import JudgeConfig
from pipeline.events import JudgeMeasured, now_us
from pipeline.telemetry.logs import get_logger

log = get_logger("judge.monitor")

_EVERY_S = 5.0
_SAY_S = 60.0
"""Least time between two events about the same judge's groups."""
_KEPT = 200


Publish = Callable[[JudgeMeasured], Awaitable[object]]


class Watch:
    """Writes `judge.json` and judges the anchors."""

    def __init__(
        self,
        config: JudgeConfig,
        path: Path,
        rulers: Mapping[str, LlmRuler],
        anchors: Sequence[LabelledGroup],
        publish: Publish,
        *,
        project: str = "",
        judge: str = "",
    ) -> None:
        """`judge` is the judge configuration's hash."""
        self._publish, self._project, self._judge = publish, project, judge
        self._said: dict[str, tuple[int, float]] = {}
        self._config, self._path, self._rulers, self._anchors = config, path, rulers, anchors
        self.anchor_runs: list[dict[str, Any]] = []

    async def run(self) -> None:
        """For as long as the service lives."""
        async with anyio.create_task_group() as tg:
            if self._anchors and self._rulers:
                tg.start_soon(self._judge_anchors)
            try:
                while True:
                    self.write()
                    await self.say(_SAY_S)
                    await anyio.sleep(_EVERY_S)
            finally:
                with anyio.move_on_after(2, shield=True):
                    await self.say()

    async def say(self, every_s: float = 0.0) -> None:
        """Publish what each ruler measured, where there is something new since the last time, `every_s` ago or more."""
        for name, ruler in self._rulers.items():
            groups, at = self._said.get(name, (0, -every_s))
            if ruler.measured.groups == groups or time.monotonic() - at < every_s:
                continue
            self._said[name] = (ruler.measured.groups, time.monotonic())
            found = ruler.measured
            await self._publish(
                JudgeMeasured(
                    **self._about(name, ruler), kind="groups", groups=found.groups, failed=found.failed_judgings,
                    calls=found.calls, asked_again=found.asked_again, prompt_tokens=found.prompt_tokens,
                    completion_tokens=found.completion_tokens, cost_usd=found.cost_usd,
                    self_agreement=found.self_agreement if found.agreement_groups else None,
                    position_bias=found.bias.first_place() if found.agreement_groups else None,
                )
            )  # fmt: skip

    def _about(self, name: str, ruler: LlmRuler) -> dict[str, Any]:
        return {
            "project": self._project,
            "judge": self._judge,
            "model": self._config.model,
            "ruler": name or "default",
            "rubric": ruler.rubric.name,
            "rubric_hash": ruler.rubric.hash,
        }

    def write(self) -> None:
        """Replace the file by the present state, whole or not at all."""
        state = {
            "at": now_us(),
            "model": self._config.model,
            "alarm": bool(self.anchor_runs and self.anchor_runs[-1]["alarm"]),
            "rulers": {
                name or "default": {
                    "rubric": ruler.rubric.name,
                    "rubric_hash": ruler.rubric.hash,
                    **ruler.measured.as_dict(),
                }
                for name, ruler in self._rulers.items()
            },
            "anchors": self.anchor_runs,
        }
        temporary = self._path.with_suffix(".json.tmp")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.encode(state))
        temporary.replace(self._path)

    async def _judge_anchors(self) -> None:
        while True:
            for name, ruler in self._rulers.items():
                await self.check(name, ruler)
            self.write()
            await anyio.sleep(self._config.anchors.every_s)

    async def check(self, name: str, ruler: LlmRuler) -> None:
        """Judge the anchors once and raise the alarm where agreement is lost."""
        pairs = []
        failed = 0
        for group in self._anchors:
            try:
                scores, _ = await ruler.judge(group.transcripts, measure=False)
            except JudgingError as error:
                failed += 1
                log.warning("anchor not judged", anchor=group.id, reason=str(error)[:300])
            else:
                pairs.append((group.rewards, scores))
        found = agreement(pairs)
        alarm = not pairs or found.kendall_tau < self._config.anchors.min_tau
        self.anchor_runs.append(
            {
                "at": now_us(),
                "ruler": name or "default",
                "kendall_tau": found.kendall_tau,
                "pairwise_accuracy": found.pairwise_accuracy,
                "sign_flips": found.sign_flips,
                "groups": len(pairs),
                "failed": failed,
                "alarm": alarm,
            }
        )
        del self.anchor_runs[:-_KEPT]
        await self._publish(
            JudgeMeasured(
                **self._about(name, ruler), kind="anchors", groups=len(pairs), failed=failed, alarm=alarm,
                kendall_tau=found.kendall_tau if pairs else None, sign_flips=found.sign_flips if pairs else None,
                pairwise_accuracy=found.pairwise_accuracy if pairs else None,
            )
        )  # fmt: skip
        say = log.error if alarm else log.info
        say("judge drifts" if alarm else "anchors judged", ruler=name or "default", kendall_tau=found.kendall_tau, failed=failed)  # fmt: skip
