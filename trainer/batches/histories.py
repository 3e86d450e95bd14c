"""Reads the exchanges of waiting groups from the log and builds their token sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import anyio
import numpy as np

from pipeline.config import TrainerConfig
from pipeline.events import ExchangeRecorded, Hint, Member, TeacherAnswered
from pipeline.gather import gather
from pipeline.log.broker import Broker, HistoryGoneError
from pipeline.log.messages import Place
from pipeline.names import is_outside
from pipeline.sampling import Defaults
from pipeline.telemetry.logs import get_logger
from trainer.batches.groups import Refusal, TrainingGroup
from trainer.batches.returns import NO_ROLES, reached
from trainer.batches.sequences import OTHER_BRANCH, TokenSequence, build
from trainer.distillation.lessons import Answer, answers_of
from trainer.distillation.prompts import HintedPrompts, HintUnusableError, best_run, is_better, transcript

log = get_logger("trainer.batches.histories")

Run = tuple[Member, list[ExchangeRecorded]]

_CONCURRENT_READS = 16
"""Trajectories whose exchanges are read at the same time."""


class Histories:
    """Reads exchanges for the groups of one model. `broker` must outlive it.

    `settings` are those of the model. `defaults` are the sampling parameters that the inference server uses where a
    request names none; `prompts` renders the teacher's, `None` if no hint is distilled. `may_train`: whether a
    model may learn from what a version answered (`Config.may_train`)."""

    def __init__(
        self,
        broker: Broker,
        settings: TrainerConfig,
        defaults: Defaults,
        prompts: HintedPrompts | None = None,
        may_train: Callable[[str], bool] = lambda version: not is_outside(version),
    ) -> None:
        self._broker, self._settings, self._defaults, self._prompts = broker, settings, defaults, prompts
        self._may_train = may_train
        self._limit = anyio.CapacityLimiter(_CONCURRENT_READS)
        self.shared_until: int | None = None
        """The step up to which the versions of the trained branch are those of `main`; `None` on `main`."""

    async def read_all(self, groups: Sequence[TrainingGroup]) -> dict[Place, Refusal]:
        """Set `sequences` of the groups that lack them. Returns, by place, the groups whose exchanges the log no
        longer holds."""
        missing = [g for g in groups if g.sequences is None]
        refusals = zip(missing, await gather(self.read, missing), strict=True)
        return {group.place: refusal for group, refusal in refusals if refusal is not None}

    async def read(self, group: TrainingGroup) -> Refusal | None:
        """Set `sequences`, `hinted`, `answers`, `left_out` and `duration_s` of a group, or return why its exchanges
        can't be read."""
        sequences = []
        group.left_out.clear()
        group.hinted.clear()
        group.answers.clear()
        group.roles.clear()
        group.hints = group.hints_unused = group.unjudged_tokens = 0
        runs: list[Run] = []
        for member in group.members:
            try:
                exchanges = await self._exchanges(group.event.project, member)
            except HistoryGoneError as error:
                return Refusal("history_gone", str(error))
            # Every request repeats its conversation: those of all runs together take much more memory than the tokens.
            runs.append((member, exchanges if self._prompts is not None else []))
            group.duration_s = max(group.duration_s, _duration_s(exchanges))
            if roles := {e.seq: e.role for e in exchanges if e.role}:
                group.roles[member.trajectory] = roles
            built = build(
                member.trajectory,
                exchanges,
                defaults=self._defaults,
                mask_truncated=self._settings.loss.mask_truncated,
                left_out=group.left_out,
                replay=self._settings.router_replay,
            )
            sequences += [
                self._with_own_versions(group, self._without_unjudged(group, member, sequence))
                for sequence in built
            ]
            if self._settings.distill.asks_outside and member.teacher:
                group.answers[member.trajectory] = await self._answers(group.event.project, member, exchanges)
                if others := {float(t) for s in built for t in s.temperatures[s.loss_mask]} - {1.0}:
                    log.warning(
                        "teacher's answer not used for tokens that were not sampled at temperature 1",
                        trajectory=member.trajectory, teacher=member.teacher, temperatures=sorted(others),
                    )  # fmt: skip
        if self._prompts is not None:
            self._render_hints(group, self._prompts, runs)
        group.sequences = sequences
        return None

    def _with_own_versions(self, group: TrainingGroup, sequence: TokenSequence) -> TokenSequence:
        """The sequence with the steps of another branch's versions marked. A replay's later versions have the numbers
        of this branch's, and are others: their logprobs are not to be compared with these."""
        if self.shared_until is None or not group.event.offline:
            return sequence
        steps = np.where(sequence.steps > self.shared_until, OTHER_BRANCH, sequence.steps)
        return replace(sequence, steps=steps.astype(np.int32))

    def _without_unjudged(
        self, group: TrainingGroup, member: Member, sequence: TokenSequence
    ) -> TokenSequence:
        """The sequence, in which calls that nothing judged are context, unless a teacher from outside teaches them."""
        if (
            member.graded == "run"
            or sequence.calls is None
            or (self._settings.distill.asks_outside and member.teacher)
        ):
            return sequence
        roles = group.roles.get(member.trajectory, NO_ROLES)
        calls = int(sequence.calls.max(initial=0)) + 1
        unjudged = (
            sequence.loss_mask
            & ~reached(member, calls, self._settings.loss.turn_discount, roles)[sequence.calls]
        )
        group.unjudged_tokens += int(unjudged.sum())
        return sequence.masking_out(unjudged)

    def _render_hints(self, group: TrainingGroup, prompts: HintedPrompts, runs: Sequence[Run]) -> None:
        """Set the prompts that the teacher gets: for each call with hints, its own prompt and the hints; for each call
        of a run that the group's best run is shown to, also the transcript of that run, as a correction: what the call
        should have led to. Counts hints and transcripts, and those that no prompt can be made of; where none can be
        made with the transcript, the call's own hints stand alone."""
        best = best_run(group.members, prompts.config.best_run_reward)
        correction = self._correction(group, best, runs)
        for member, exchanges in runs:
            calls = {e.seq: e for e in exchanges}
            example = correction if best is not None and is_better(best, member) else []
            hints: dict[int, list[Hint]] = {}
            for hint in member.hints if calls else ():
                # A hint for the run as a whole (-1) is given to its first call.
                hints.setdefault(min(calls) if hint.call < 0 else hint.call, []).append(hint)
            for call in sorted(hints.keys() | (calls.keys() if example else ())):
                given = [*(example if call in calls else []), *hints.get(call, [])]
                group.hints += len(given)
                while given:
                    try:
                        if call not in calls:
                            raise HintUnusableError(f"the run has no call {call}")
                        prompt = prompts.render(calls[call], prompts.text_of(given))
                        group.hinted.setdefault(member.trajectory, {})[call] = prompt
                        break
                    except HintUnusableError as error:
                        unused = example if given[:1] == example else given
                        group.hints_unused += len(unused)
                        given = given[len(unused) :]
                        log.warning(
                            "hint not used", trajectory=member.trajectory, call=call, reason=str(error)[:500]
                        )

    def _correction(self, group: TrainingGroup, best: Member | None, runs: Sequence[Run]) -> list[Hint]:
        """The transcript of the group's best run, for its worse runs; nothing if there are none. Counts one that can't
        be made, or that an outside model wrote whose table does not say `may_train`, as a hint that is not used."""
        shown = next((exchanges for member, exchanges in runs if member is best), [])
        if best is None or not shown or not any(is_better(best, member) for member in group.members):
            return []
        try:
            if forbidden := {e.policy_version for e in shown if not self._may_train(e.policy_version)}:
                raise HintUnusableError(
                    f"{', '.join(forbidden)} answered it, whose table does not say may_train"
                )
            return [Hint(call=-1, text=transcript(shown), kind="correction")]
        except HintUnusableError as error:
            group.hints, group.hints_unused = 1, 1
            log.warning("best run not shown", trajectory=best.trajectory, reason=str(error)[:500])
            return []

    async def _answers(
        self, project: str, member: Member, exchanges: Sequence[ExchangeRecorded]
    ) -> list[Answer]:
        """What the teacher from outside said of a run; nothing if the log has deleted it, or if it is about other
        tokens."""
        async with self._limit:
            recorded = await self._broker.read(
                TeacherAnswered,
                project=project,
                trajectory=member.trajectory,
                teacher=member.teacher,
                at_least=1,
            )
        answers = answers_of(recorded[0].event, exchanges) if recorded else []
        if not answers:
            log.warning("teacher's answer not used", trajectory=member.trajectory, teacher=member.teacher)
        return answers

    async def _exchanges(self, project: str, member: Member) -> list[ExchangeRecorded]:
        """The exchanges of a member. Raises `HistoryGoneError` where fewer can be read than the member had: the log
        deleted some, or one that others continue."""
        read = partial(self._broker.read, ExchangeRecorded, project=project, trajectory=member.trajectory)
        async with self._limit:
            exchanges = [r.event for r in await read(at_least=member.exchanges)]
        if _distinct(exchanges) < member.exchanges <= len(exchanges):
            # Some exchange is there twice, so the count did not show that the answering replica lags: ask the leader.
            exchanges = [r.event for r in await read()]
        if (readable := _distinct(exchanges)) < member.exchanges:
            raise HistoryGoneError(
                f"the whole history of trajectory {member.trajectory} ({readable} of {member.exchanges} exchanges "
                "can be read)"
            )
        return exchanges


def _distinct(exchanges: Sequence[ExchangeRecorded]) -> int:
    return len({(e.seq, e.choice) for e in exchanges})


def _duration_s(exchanges: Sequence[ExchangeRecorded]) -> float:
    if not exchanges:
        return 0.0
    return (max(e.at for e in exchanges) - min(e.started_at or e.at for e in exchanges)) / 1e6
