"""Reads the exchanges of waiting groups from the log and builds their token sequences.

`trainer.queues` asks for a group's history before its step, as `Histories.read`. It holds the sequences of the runs,
the prompts of a teacher that is the policy itself with a hint in its prompt (`trainer.distillation.prompts`), and the
answers of a teacher from outside (`rollout.teacher`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import anyio
import numpy as np
import numpy.typing as npt

from pipeline.chat.sampling import Defaults
from pipeline.config import TrainerConfig
from pipeline.events import ExchangeRecorded, Hint, Member, TeacherAnswered
from pipeline.log.broker import Broker, HistoryGoneError
from pipeline.telemetry.logs import get_logger
from trainer.batches.groups import AdmittedGroup, GroupWithHistory, History, Refusal
from trainer.batches.returns import Roles, calls_with_credit
from trainer.distillation.prompts import HintedPrompts, HintUnusableError, best_run, is_better, transcript
from trainer.distillation.teacher import TeacherAnswer, answers_by_call
from trainer.sequences import OTHER_BRANCH, TokenSequence, build

logger = get_logger("trainer.batches.histories")

Run = tuple[Member, list[ExchangeRecorded]]
"""A run of a group, with its calls in order."""
MayTrain = Callable[[str], bool]
"""Whether a model may learn from what a version answered (`Config.may_train`)."""

_CONCURRENT_READS = 16
"""Trajectories whose exchanges are read at the same time."""


class Histories:
    """Reads exchanges for the groups of one model. `broker` must outlive it.

    `settings` are those of the model. `defaults` are the sampling parameters that the inference server uses where a
    request names none; `prompts` renders the teacher's, `None` if no hint is distilled."""

    def __init__(
        self,
        broker: Broker,
        settings: TrainerConfig,
        defaults: Defaults,
        prompts: HintedPrompts | None,
        may_train: MayTrain,
    ) -> None:
        self._broker, self._settings, self._defaults, self._prompts = broker, settings, defaults, prompts
        self._may_train = may_train
        self._limit = anyio.CapacityLimiter(_CONCURRENT_READS)
        self.shared_until: int | None = None
        """The step up to which the versions of the trained branch are those of `main`; `None` on `main`."""

    async def read(self, group: AdmittedGroup) -> GroupWithHistory | Refusal:
        """Read the exchanges of a group's runs, or return why they can't be read."""
        history = History()
        runs: list[Run] = []
        for member in group.members:
            try:
                exchanges = await self._exchanges(group.event.project, member)
            except HistoryGoneError as error:
                return Refusal("history_gone", str(error), history.duration_s)
            if self._prompts is not None:
                # Only then: every request repeats its conversation, and those of all runs take much more memory than
                # the tokens.
                runs.append((member, exchanges))
            history.duration_s = max(history.duration_s, _duration_s(exchanges))
            sequences = self._sequences(history, group, member, exchanges)
            if self._settings.distill.asks_outside and member.teacher:
                answers = await self._teacher_answers(group.event.project, member, exchanges)
                history.answers[member.trajectory] = answers
                _warn_of_temperatures(member, sequences)
            history.sequences += tuple(sequences)
        if self._prompts is not None:
            _render_hints(history, self._prompts, runs, self._may_train)
        return GroupWithHistory(group, history)

    def _sequences(
        self, history: History, group: AdmittedGroup, member: Member, exchanges: Sequence[ExchangeRecorded]
    ) -> list[TokenSequence]:
        """Return the token sequences of a run. Adds to `history` the agent of each call, and how many tokens are not
        trained because nothing judged their calls or because of their sampling settings."""
        roles = {e.seq: e.role for e in exchanges if e.role}
        if roles:
            history.roles[member.trajectory] = roles
        out = []
        for sequence in build(
            member.trajectory,
            exchanges,
            defaults=self._defaults,
            mask_truncated=self._settings.loss.mask_truncated,
            left_out=history.left_out,
        ):
            unjudged = self._unjudged(member, sequence, roles)
            history.unjudged_tokens += int(unjudged.sum())
            if unjudged.any():
                sequence = sequence.masking_out(unjudged)
            out.append(self._with_own_versions(group, sequence))
        return out

    def _with_own_versions(self, group: AdmittedGroup, sequence: TokenSequence) -> TokenSequence:
        """Return the sequence with `OTHER_BRANCH` as the step of tokens that another branch's version sampled. In an
        offline group a later version's number may also be that of a version of this branch, whose logprobs differ."""
        if self.shared_until is None or not group.event.offline:
            return sequence
        steps = np.where(sequence.steps > self.shared_until, OTHER_BRANCH, sequence.steps)
        return replace(sequence, steps=steps.astype(np.int32))

    def _unjudged(self, member: Member, sequence: TokenSequence, roles: Roles) -> npt.NDArray[np.bool_]:
        """Return which trained tokens belong to calls that nothing judged, [T]: no token if the whole run was judged,
        or if a teacher from outside has logprobs of it."""
        has_teacher = self._settings.distill.asks_outside and member.teacher
        if member.graded == "run" or sequence.calls is None or has_teacher:
            return np.zeros(len(sequence.ids), np.bool_)
        calls = int(sequence.calls.max(initial=0)) + 1
        credited = calls_with_credit(member, calls, self._settings.loss.turn_discount, roles)
        return sequence.loss_mask & ~credited[sequence.calls]

    async def _teacher_answers(
        self, project: str, member: Member, exchanges: Sequence[ExchangeRecorded]
    ) -> list[TeacherAnswer]:
        """Read the logprobs of a run's calls by the teacher from outside. Empty if the log has deleted them, or if they
        are about other tokens."""
        async with self._limit:
            recorded = await self._broker.read(
                TeacherAnswered, project=project, trajectory=member.trajectory, teacher=member.teacher, at_least=1
            )
        answers = answers_by_call(recorded[0].event, exchanges) if recorded else []
        if not answers:
            logger.warning("teacher's answer not used", trajectory=member.trajectory, teacher=member.teacher)
        return answers

    async def _exchanges(self, project: str, member: Member) -> list[ExchangeRecorded]:
        """Read the exchanges of a run. Raises `HistoryGoneError` if fewer can be read than the run had, because the log
        deleted some."""
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


def _warn_of_temperatures(member: Member, sequences: Sequence[TokenSequence]) -> None:
    """Log the temperatures, other than 1, at which trained tokens of a run were sampled: a teacher from outside is
    asked at temperature 1 and teaches none of these."""
    if others := {float(t) for s in sequences for t in s.temperatures[s.loss_mask]} - {1.0}:
        logger.warning(
            "teacher's answer not used for tokens that were not sampled at temperature 1",
            trajectory=member.trajectory,
            teacher=member.teacher,
            temperatures=sorted(others),
        )


def _distinct(exchanges: Sequence[ExchangeRecorded]) -> int:
    """Return the number of exchanges; one that was recorded twice counts once."""
    return len({(e.seq, e.choice) for e in exchanges})


def _render_hints(history: History, prompts: HintedPrompts, runs: Sequence[Run], may_train: MayTrain) -> None:
    """Add to `history` the teacher's prompts, and the numbers of hints used and unused.

    The prompt of a call is its own prompt with its hints. In runs that are worse than the group's best run, the
    transcript of the best run comes first, as a correction. If no prompt can be made with the transcript, the call's
    own hints stand alone."""
    best = best_run([member for member, _ in runs], prompts.config.best_run_reward)
    transcripts, unused = _best_run_as_hint(best, runs, may_train)
    history.hints = history.hints_unused = unused
    for member, exchanges in runs:
        calls = {e.seq: e for e in exchanges}
        example = transcripts if best is not None and is_better(best, member) else []
        hints, forbidden = _hints_by_call(member, calls, may_train)
        history.hints += forbidden
        history.hints_unused += forbidden
        for call in sorted(hints.keys() | (calls.keys() if example else ())):
            given = [*(example if call in calls else []), *hints.get(call, [])]
            history.hints += len(given)
            while given:
                try:
                    if call not in calls:
                        raise HintUnusableError(f"the run has no call {call}")
                    prompt = prompts.render(calls[call], prompts.text_of(given))
                    history.teacher_prompts.setdefault(member.trajectory, {})[call] = prompt
                    break
                except HintUnusableError as error:
                    refused = example if given[:1] == example else given
                    history.hints_unused += len(refused)
                    given = given[len(refused) :]  # the call's own hints are tried again without the transcript
                    logger.warning("hint not used", trajectory=member.trajectory, call=call, reason=str(error)[:500])


def _hints_by_call(
    member: Member, calls: Mapping[int, ExchangeRecorded], may_train: MayTrain
) -> tuple[dict[int, list[Hint]], int]:
    """Return the hints of a run by call, and how many were left out because `may_train` forbids the model that wrote
    them. A hint on the whole run (call -1) is given to its first call."""
    hints: dict[int, list[Hint]] = {}
    forbidden = 0
    for hint in member.hints if calls else ():
        if hint.version and not may_train(hint.version):
            forbidden += 1
            reason = f"{hint.version} wrote it, whose table does not say may_train"
            logger.warning("hint not used", trajectory=member.trajectory, call=hint.call, reason=reason)
        else:
            hints.setdefault(min(calls) if hint.call < 0 else hint.call, []).append(hint)
    return hints, forbidden


def _best_run_as_hint(best: Member | None, runs: Sequence[Run], may_train: MayTrain) -> tuple[list[Hint], int]:
    """Return the transcript of the group's best run as a hint for the worse runs, in a list; empty if no run is worse.
    Return also the number of unused hints: 1 if the transcript can't be made, or may not be used because an outside
    model whose table does not say `may_train` answered a call."""
    shown = next((exchanges for member, exchanges in runs if member is best), [])
    if best is None or not shown or not any(is_better(best, member) for member, _ in runs):
        return [], 0
    try:
        if forbidden := {e.policy_version for e in shown if not may_train(e.policy_version)}:
            raise HintUnusableError(f"{', '.join(forbidden)} answered it, whose table does not say may_train")
        return [Hint(call=-1, text=transcript(shown), kind="correction")], 0
    except HintUnusableError as error:
        logger.warning("best run not shown", trajectory=best.trajectory, reason=str(error)[:500])
        return [], 1


def _duration_s(exchanges: Sequence[ExchangeRecorded]) -> float:
    """Return the seconds from the first call to the last answer; 0 without exchanges."""
    if not exchanges:
        return 0.0
    return (max(e.at for e in exchanges) - min(e.started_at or e.at for e in exchanges)) / 1e6
