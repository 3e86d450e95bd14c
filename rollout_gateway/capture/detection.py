"""Detects the trajectories ("runs") of agents that name none, by the messages of their calls (opt-in:
`gateway.detection.enabled`). `identity` has the run of a call found, and `handler` reports its answer.

A call whose messages begin with everything that a run had said and been answered so far belongs to that run. A run
without a call for `gateway.detection.idle_s` is completed. Two runs that have said exactly the same can't be told
apart; which of them a call continues is then arbitrary, and harmless, since both are equal up to there.

A call that changed its history belongs to the run whose answer it quotes (`conversations`): one that was cut, handed
over or summarized takes the run over, an agent that the run's agent started becomes a "branch" of it. If several runs
may be meant, the call begins a "part": a run whose beginning is recorded as another run. So does a call whose history
no run has. A part is in no group with whole runs, and a run whose rest it may be is masked, so not trained. Any other
call begins a run, in the group of those that began alike (`gateway.detection.grouped`).

Any gateway process may get the next call of a run, also at the same time as others: a run that waits for its next call
is a message on the log (`waiting_runs`), and only the process that takes it away has the run until the call is
answered. Any process completes runs that waited too long. A gateway that starts "restores" the runs that no process
seems to have, because theirs was killed in the middle of a call: it has them wait again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from pipeline.config import GatewayConfig
from pipeline.events import ExchangeRecorded, TrajectoryOpened
from pipeline.log.broker import BrokerError
from pipeline.names import InvalidNameError, new_dated_id, new_id
from pipeline.telemetry.logs import get_logger
from rollout_gateway.capture.conversations import CallMessages, Match, Quote, quotes
from rollout_gateway.capture.registry import DETECTED, Completion, Registry
from rollout_gateway.capture.trajectory import Trajectory
from rollout_gateway.capture.waiting_runs import WaitingRun, WaitingRuns, no_history
from rollout_gateway.dialects.calls import Answer, Call, Fields, decode_field
from rollout_gateway.http.errors import ApiError

logger = get_logger("rollout_gateway.capture.detection")

_CHECK_S = 1.0
_CALL_FAILED_S = 2.0
"""A run that was taken and has had no call in flight for so long will get no answer: its call has failed."""
_RESTART_S = 60.0
"""How much longer quotes are kept than runs wait, for the time in which no gateway may be there."""
_MAX_PROGRAMS = 8
"""Programs of a run that are remembered, the newest ones."""


@dataclass(frozen=True, eq=False)
class _TakenRun:
    """A run that this process took for a call, until the call is answered."""

    run: Trajectory
    conversation: CallMessages
    waits_again_as: WaitingRun
    """What is put back if the call fails; after an answer, with the history that the answer makes."""
    branch_number: int
    """Of `WaitingRuns.begin_branch`; 0: the call is of no branch."""


class TrajectoryDetector:
    """Finds detected trajectories, and completes them."""

    def __init__(self, project: str, registry: Registry, config: GatewayConfig) -> None:
        self._project, self._registry = project, registry
        self._idle_s, self._outcome = config.detection.idle_s, config.detection.outcome
        self._grouped = config.detection.grouped
        # Another gateway may have a call of a restored run in flight; it is recorded only when it ends.
        self._restored_idle_s = config.detection.idle_s + config.replicas.timeout_s
        self._waiting = WaitingRuns(registry.log.broker, project, self._idle_s + _RESTART_S, self._restored_idle_s)
        self._taken: dict[_TakenRun, None] = {}
        """Each is also in `Call.detected`."""
        self._unpublished: list[WaitingRun] = []
        """Runs that are to wait and whose message the log did not take yet."""
        self._ready = asyncio.Event()
        """Set once unfinished runs are restored: a call before that could be taken for the beginning of a new run."""
        self._serving_since = 0.0
        """Unix time at which this process began to serve calls. The idle time of a run counts from then at the
        earliest, because agents could not call before."""

    async def find(self, call: Call, model: str, owner: str = "") -> Trajectory:
        """Return the run that a call continues, or a new one. A run continues only with calls of the key that began it,
        named `owner`. Raises `BrokerError`."""
        await self._ready.wait()
        conversation = _conversation(owner, model, call.fields)
        for history in conversation.possible_histories():
            while (waiting := await self._waiting.find(f"{history}.*")) is not None:
                if (run := await self._take(call, conversation, waiting)) is not None:
                    return run
        quoted_runs = await self._quoted_runs(conversation)
        if (run := await self._take_quoted(call, conversation, quoted_runs)) is not None:
            return run
        # It quotes a run, or has an answer of a model in it, so its beginning was recorded elsewhere.
        is_part = bool(quoted_runs.keys() - {"none"} or conversation.up_to_answer)
        # If another key could predict the name, it could open the group first, and the calls would be refused.
        alike = ("i-part-" if is_part else "i-") + self._registry.tokens.group_name(conversation.group)
        event = TrajectoryOpened(
            project=self._project,
            trajectory=new_dated_id(DETECTED),
            model=model,
            group=alike if self._grouped else "",
            metadata=b'{"inferred":true,"part":true}' if is_part else b'{"inferred":true}',
            owner=owner,
        )
        # Its client knows nothing of groups.
        run = await self._registry.open(event, "", paced=False, named=False)
        return self._keep_for(call, _TakenRun(run, conversation, WaitingRun(run.id, no_history(run.id), 0), 0))

    def _keep_for(self, call: Call, taken: _TakenRun) -> Trajectory:
        """Note that a run was taken for a call, until the call is answered or fails. Returns the run."""
        taken.run.used_at = time.monotonic()
        call.detected = taken
        self._taken[taken] = None
        return taken.run

    async def _take_quoted(
        self, call: Call, conversation: CallMessages, quoted_runs: dict[Match, list[tuple[str, WaitingRun]]]
    ) -> Trajectory | None:
        """Take the run whose answer the messages quote, or begin a branch of it. Returns `None` if there is none, or if
        several may be meant. `quoted_runs`: as `_quoted_runs` returns them."""
        continued = quoted_runs.get("certain") or quoted_runs.get("likely") or []
        branches = {waiting.subject_end: waiting for _, waiting in quoted_runs.get("branch", ())}
        if len({waiting.history for _, waiting in continued}) == 1:
            # Runs with the same history are equal up to here, so any of them is right.
            for _, waiting in continued:
                if (run := await self._take(call, conversation, waiting)) is not None:
                    return run
        elif len({fingerprint for fingerprint, _ in continued}) == 1:
            # Several runs said the same in the end. None is whole from now on: the rest of one is recorded elsewhere.
            for _, waiting in continued:
                if await self._waiting.take(waiting):
                    await self._publish_waiting(replace(waiting, cut=True))
        elif len(branches) == 1 and not continued:
            (parent,) = branches.values()
            return await self._begin_branch(call, conversation, parent)
        return None

    async def _quoted_runs(self, conversation: CallMessages) -> dict[Match, list[tuple[str, WaitingRun]]]:
        """Return the waiting runs of which a call has a quote, by how well the call matches the quote, each with the
        quote's fingerprint."""
        runs: dict[Match, list[tuple[str, WaitingRun]]] = {}
        for fingerprint in conversation.fingerprints():
            for quoted in await self._waiting.find_quoted(fingerprint):
                match = quoted.quote.match(conversation, newest=quoted.newest)
                runs.setdefault(match, []).append((fingerprint, quoted.run))
        return runs

    async def _take(self, call: Call, conversation: CallMessages, waiting: WaitingRun) -> Trajectory | None:
        """Take a waiting run for a call. Returns `None` if another gateway took it, or it can't go on."""
        branch_number = await self._waiting.begin_branch(waiting.run) if waiting.branch else 0
        run = await self._resume(waiting) if await self._waiting.take(waiting) else None
        if run is None:
            await self._waiting.end_branch(branch_number)
            return None
        waits_again_as = replace(waiting, calls=run.recorded.next_seq, restored=False)
        return self._keep_for(call, _TakenRun(run, conversation, waits_again_as, branch_number))

    async def _begin_branch(self, call: Call, conversation: CallMessages, parent: WaitingRun) -> Trajectory | None:
        """Begin a branch of the run that waits as `parent`, with this call. Returns the run; `None` if it waits no
        longer."""
        branch_number = await self._waiting.begin_branch(parent.run)
        # From now on no gateway completes the run, unless one took it before.
        still_waiting = await self._waiting.find(parent.subject_end)
        run = await self._resume(replace(still_waiting, restored=False)) if still_waiting is not None else None
        if run is None:
            await self._waiting.end_branch(branch_number)
            return None
        waits_again_as = WaitingRun(run.id, no_history(new_id("branch")), 0, branch=True)
        return self._keep_for(call, _TakenRun(run, conversation, waits_again_as, branch_number))

    async def _resume(self, waiting: WaitingRun) -> Trajectory | None:
        """Return the run of a waiting run that was taken, up to date with the log. Returns `None` if it can't go on: it
        was completed, or it was restored although its process lived, and has had another call since. Raises
        `BrokerError`; then the run waits again later."""
        try:
            run = await self._registry.find(waiting.run)
            if waiting.restored or run.recorded.next_seq != waiting.calls:
                await run.refresh()
        except ApiError as error:
            logger.info("detected trajectory can't be continued", trajectory=waiting.run, reason=error.code)
            return None
        except BrokerError:
            self._unpublished.append(waiting)
            raise
        return None if waiting.restored and run.recorded.next_seq > waiting.calls else run

    async def note_answer(self, trajectory: Trajectory, call: Call, answer: Answer) -> None:
        """Note the answer to a call: its run waits from now on for a call whose messages begin with the conversation up
        to this answer. Nothing happens for a call whose run was not detected."""
        taken = call.detected
        if not isinstance(taken, _TakenRun) or taken not in self._taken or not answer.choices:
            return
        del self._taken[taken]
        message = msgspec.json.decode(answer.choices[0].fields.get("message", msgspec.Raw(b"{}")))
        answered = taken.conversation.with_answer(message)
        programs = [*dict.fromkeys([*taken.waits_again_as.programs, answered.program])][-_MAX_PROGRAMS:]
        history, calls = answered.histories[-1], trajectory.recorded.next_seq
        waiting = replace(taken.waits_again_as, history=history, calls=calls, programs=programs, cut=False)
        await self._publish_waiting(waiting, quotes(answered, programs))
        await self._waiting.end_branch(taken.branch_number)

    async def _publish_waiting(self, waiting: WaitingRun, quotes: Iterable[Quote] = ()) -> None:
        """Publish that a run waits, and `quotes` of it. If the log does not answer, `run` publishes the run later."""
        try:
            await self._waiting.put(waiting, quotes)
        except BrokerError as error:
            logger.warning("detected trajectory waits for the log", trajectory=waiting.run, error=str(error))
            self._unpublished.append(waiting)

    # -- completing ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Restore the runs that no process has. Then, for ever, have runs whose call failed wait again, and complete
        runs without a call for too long. `service` starts it; calls wait until runs are restored."""
        await self._restore()
        self._serving_since = time.time()
        self._ready.set()
        while True:
            # Not all gateways at the same moment: they would try to complete the same runs.
            await asyncio.sleep(min(_CHECK_S, self._idle_s / 2) * random.uniform(0.5, 1.0))
            unpublished, self._unpublished = self._unpublished, []
            for waiting in unpublished:
                await self._publish_waiting(waiting)
            await self._put_back_failed()
            try:
                await self._complete_idle()
            except BrokerError as error:
                logger.warning("detected trajectories are completed later", error=str(error))

    async def _put_back_failed(self) -> None:
        """Publish again as waiting the runs whose call ended without an answer."""
        before = time.monotonic() - _CALL_FAILED_S
        for taken in list(self._taken):
            # A call may have been answered while another run was put back.
            if taken in self._taken and not taken.run.in_flight and taken.run.used_at < before:
                del self._taken[taken]
                await self._publish_waiting(replace(taken.waits_again_as, calls=taken.run.recorded.next_seq))
                await self._waiting.end_branch(taken.branch_number)

    async def _restore(self) -> None:
        """Publish as waiting all detected runs that are neither completed nor waiting: the processes that had them are
        gone. Tries until the log answers."""
        while True:
            try:
                waiting = await self._waiting.run_ids()
                unfinished = await self._registry.log.unfinished(f"{DETECTED}-")
                break
            except BrokerError as error:
                logger.warning("detected trajectories wait for the log", error=str(error))
                await asyncio.sleep(_CHECK_S)
        restored = 0
        for name in unfinished:
            if name in waiting:
                continue
            try:
                trajectory = await self._registry.find(name)
                if not msgspec.json.decode(bytes(trajectory.opened.metadata)).get("inferred"):
                    continue
                last = await trajectory.last_answer()
                history = _history_of(trajectory, last) if last is not None else no_history(name)
            except (ApiError, BrokerError, InvalidNameError) as error:
                logger.warning("detected trajectory not restored", trajectory=name, error=str(error))
                continue
            await self._publish_waiting(WaitingRun(name, history, trajectory.recorded.next_seq, restored=True))
            restored += 1
        logger.info("detected trajectories", waiting=len(waiting), restored=restored)

    async def _complete_idle(self) -> None:
        """Complete the runs of the project that have waited for too long, whichever process had them last."""
        after = 0
        while (waiting := await self._waiting.oldest_after(after)) is not None:
            waited_s = time.time() - max(waiting.since, self._serving_since)
            if waited_s < self._idle_s:
                return  # so have all that come after it
            after = waiting.seq
            if waiting.restored and waited_s < self._restored_idle_s:
                continue
            if await self._waiting.take(waiting) and not waiting.branch:
                await self._complete(waiting)

    async def _complete(self, waiting: WaitingRun) -> None:
        """Complete a run that was taken. If another process had a call of it or of a branch meanwhile, it waits
        again."""
        try:
            run = await self._resume(waiting)
            if run is None:
                return
            await run.refresh()
            if run.recorded.next_seq > waiting.calls or await self._waiting.has_branch(run.id):
                await self._publish_waiting(replace(waiting, calls=run.recorded.next_seq))
                return
            completion = Completion(outcome="masked" if waiting.cut else self._outcome)
            await self._registry.complete(waiting.run, completion, inferred=True)
        except BrokerError as error:
            logger.warning("detected trajectory is completed later", trajectory=waiting.run, error=str(error))
            if waiting not in self._unpublished:
                self._unpublished.append(waiting)
        except ApiError as error:
            logger.warning("detected trajectory not completed", trajectory=waiting.run, error=error.message)


def _history_of(trajectory: Trajectory, last: ExchangeRecorded) -> str:
    """Return the history of a run up to its `last` answer, as `CallMessages.histories` computes it."""
    opened, asked = trajectory.opened, msgspec.json.decode(last.request, type=Fields)
    (choice,) = msgspec.json.decode(last.response)["choices"]
    answered = _conversation(opened.owner, opened.named, asked).with_answer(choice.get("message") or {})
    return answered.histories[-1]


def _conversation(owner: str, model: str, fields: Fields) -> CallMessages:
    """Return the messages of a chat completion with these fields. Raises a 400 `ApiError` if they can't be decoded."""
    messages, tools = (decode_field(fields.get(n, msgspec.Raw(b"null")), n) for n in ("messages", "tools"))
    return CallMessages.read(owner, model, messages, tools)
