"""The exchanges of queued groups, read from the log and built into token sequences."""

from __future__ import annotations

import anyio

from pipeline.events import ExchangeRecorded
from pipeline.log.broker import Broker, HistoryGoneError
from pipeline.log.place import Place
from pipeline.names import subject_token
from trainer.batches.groups import Refusal, trainable_members
from trainer.batches.queues import Held
from trainer.batches.sequences import TokenSequence, build
from trainer.learner import Learner

_FETCHES = 16
"""Trajectories whose exchanges are read at once."""


class Histories:
    """Reads the exchanges of groups. `broker` must outlive it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._fetching = anyio.CapacityLimiter(_FETCHES)

    async def fetch_all(self, wanted: list[Held], learner: Learner) -> dict[Place, Refusal]:
        """Fetch the exchanges of `wanted`; which of them the log no longer holds, by place."""
        gone: dict[Place, Refusal] = {}

        async def one(held: Held) -> None:
            refusal = await self.fetch(held, learner)
            if refusal is not None:
                gone[held.place] = refusal

        async with anyio.create_task_group() as tg:
            for held in wanted:
                if held.sequences is None:
                    tg.start_soon(one, held)
        return gone

    async def fetch(self, held: Held, learner: Learner) -> Refusal | None:
        defaults = learner.sampling_defaults
        sequences: list[TokenSequence] = []
        held.left_out.clear()
        project = subject_token(held.event.project)
        for member in trainable_members(held.event):
            async with self._fetching:
                try:
                    subject = f"rollout.exchange.{project}.{subject_token(member.trajectory)}"
                    history = await self._broker.history("ROLLOUTS", subject, at_least=member.exchanges)
                except HistoryGoneError as error:
                    return Refusal("history_gone", str(error))
            exchanges = [r.event for r in history if isinstance(r.event, ExchangeRecorded)]
            distinct = len({(e.seq, e.choice) for e in exchanges})
            if distinct < member.exchanges <= len(history):
                # Something lies there twice, and the replica that answered may lag: all of it, by the leader's word.
                history = await self._broker.history("ROLLOUTS", subject)
                exchanges = [r.event for r in history if isinstance(r.event, ExchangeRecorded)]
                distinct = len({(e.seq, e.choice) for e in exchanges})
            if distinct < member.exchanges:
                return Refusal(
                    "history_gone",
                    f"{member.trajectory} had {member.exchanges} exchanges, the log holds {distinct}",
                )
            held.duration_s = max(held.duration_s, _duration_s(exchanges))
            sequences += build(
                member.trajectory,
                exchanges,
                defaults=defaults,
                mask_truncated=learner.settings.mask_truncated,
                left_out=held.left_out,
            )
        held.sequences = sequences
        return None


def _duration_s(exchanges: list[ExchangeRecorded]) -> float:
    if not exchanges:
        return 0.0
    return (max(e.at for e in exchanges) - min(e.started_at or e.at for e in exchanges)) / 1e6
