"""The same runs on a log with one partition and on one with eight give equal answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline.config import AlarmsConfig, Config, NatsConfig, StoreConfig
from pipeline.events import (
    CheckpointPublished,
    Event,
    GroupDiscarded,
    GroupScored,
    JudgeMeasured,
    Member,
    Score,
    TrajectoryCompleted,
    TrajectoryOpened,
    Verdict,
    pack_seqs,
    wire_name,
)
from pipeline.log.broker import Broker
from store import docs, sql
from store.lake import lake_in
from store.maintenance import Maintenance
from store.replay import select_groups
from store.service import serve
from store.views import VIEWS
from tests.conftest import NatsServer
from tests.store.kit import exchange, stored_events, until_acked

pytestmark = pytest.mark.anyio

GROUPS, EACH, PER_STEP = 12, 4, 4
"""Groups, runs of a group, groups of a step: means of rewards are exact, whatever the order of their sum."""
QUESTIONS = docs.queries((docs.FOLDER / "questions.md").read_text("utf-8"))
_BEGAN = 1_760_000_000_000_000
_OF_THE_LOG = ("stream", "stream_seq", "stream_at", "dead_seq", "group_seq", "group_seqs", "exchange_seq")
"""Columns that say where an event lies; they differ with the number of partitions."""


def _runs(group: int) -> Iterator[Event]:
    at = _BEGAN + group * 1_000_000
    named: dict[str, Any] = {"project": "p", "model": "m", "group": f"g{group}", "task": f"task {group % 5}"}
    split = "val" if group % 6 == 5 else "train"
    for i in range(EACH):
        name = f"t{group}-{i}"
        yield TrajectoryOpened(**named, trajectory=name, split=split, at=at + i)
        for seq in range(2):
            yield exchange(
                name,
                seq,
                step=group // PER_STEP,
                group=f"g{group}",
                at=at + 10 + i + seq,
                started_at=at + seq,
            )
        yield TrajectoryCompleted(
            **named, trajectory=name, split=split, exchanges=2, calls=2, reward=i / 4, at=at + 100 + i,
            opened_at=at + i, first_step=group // PER_STEP, last_step=group // PER_STEP,
            metrics={"win": float(i == 0)}, metadata=b'{"agent": "a"}',
        )  # fmt: skip


def _scored(group: int, completed: dict[str, int]) -> GroupScored:
    names = [f"t{group}-{i}" for i in range(EACH)]
    split = "val" if group % 6 == 5 else "train"
    members = tuple(
        Member(
            trajectory=name, reward=i / 4, exchanges=2, split=split, completed_seq=completed[name],
            first_step=group // PER_STEP, last_step=group // PER_STEP,
        )
        for i, name in enumerate(names)
    )  # fmt: skip
    verdict = Verdict(
        judge_model="judge/1", rubric="general", rubric_hash="h", order=tuple(names), cost_usd=0.25, prompt_tokens=10,
        completion_tokens=5, scores=tuple(Score(trajectory=n, score=i / 4) for i, n in enumerate(names)),
    )  # fmt: skip
    return GroupScored(
        project="p", group=f"g{group}", model="m", task=f"task {group % 5}", judge="j", members=members, split=split,
        verdicts=(verdict,), at=_BEGAN + group * 1_000_000 + 500_000,
    )  # fmt: skip


async def _play(broker: Broker) -> None:
    """Publish the runs as services do: a group's score after its completions, a step after its groups."""
    scored: dict[str, int] = {}
    for group in range(GROUPS):
        completed = {}
        for event in _runs(group):
            ack = await broker.publish(event)
            if isinstance(event, TrajectoryCompleted):
                completed[event.trajectory] = ack.seq
        ack = await broker.publish(_scored(group, completed))
        scored[f"g{group}"] = ack.seq
        at = _BEGAN + group * 1_000_000 + 600_000
        if group % 7 == 6:
            await broker.publish(
                GroupDiscarded(
                    project="p", group=f"g{group}", model="m", trajectories=(f"t{group}-0",), reason="stale",
                    by="trainer", at=at,
                )
            )  # fmt: skip
        await broker.publish(
            JudgeMeasured(
                project="p",
                kind="groups",
                judge="j",
                model="judge/1",
                ruler=f"r{group % 3}",
                position_bias=0.1,
                at=at,
            )
        )
        if group % PER_STEP == PER_STEP - 1:
            step = group // PER_STEP + 1
            names = tuple(f"g{g}" for g in range(group - PER_STEP + 1, group + 1))
            await broker.publish(
                CheckpointPublished(
                    project="p", model="m", step=step, version=f"m@{step}", parent=f"m@{step - 1}", batch_id=f"b{step}",
                    groups=names, group_seqs=pack_seqs([scored[n] for n in names]), config_hash="c", adapter="a",
                    adapter_sha256="s", adapter_bytes=3, metrics={"loss": 0.5}, at=at + 1, started_at=at,
                )
            )  # fmt: skip


@asynccontextmanager
async def _running_store(config: Config) -> AsyncIterator[Broker]:
    """A store that is ready. At the end it has acknowledged everything."""
    ready = anyio.Event()

    def on_ready(**_: str | int | float) -> None:
        ready.set()

    async with Broker.connect(config.nats) as broker, anyio.create_task_group() as tg:
        tg.start_soon(serve, config, on_ready)
        await ready.wait()
        yield broker
        await until_acked(broker)
        tg.cancel_scope.cancel()


async def _store(config: Config) -> None:
    async with _running_store(config) as broker:
        await _play(broker)
        streams = {spec.name for spec in broker.layout.streams}
    assert {stream for stream, _ in stored_events(lake_in(config.path("store")))} <= streams


async def _recorded(start_nats: Callable[..., NatsServer], folder: Path, partitions: int) -> Config:
    """The settings of a run of which the store has written everything."""
    folder.mkdir()
    nats = NatsConfig(url=start_nats().url, publish_deadline_s=20, partitions=partitions)
    config = Config(
        run_dir=str(folder), nats=nats, store=StoreConfig(flush_s=0.1, compact_s=3600.0, compact_files=2),
        alarms=AlarmsConfig(every_s=3600.0),
    )  # fmt: skip
    await _store(config)
    return config


def _answers(config: Config) -> dict[str, Any]:
    """The answers to the questions as they come; the rows of every view, sorted, without what says where they lie."""
    found: dict[str, Any] = {}
    with sql.connect(config) as connection:
        for number, query in enumerate(QUESTIONS):
            found[f"question {number}"] = connection.sql(query).fetchall()
        for view in VIEWS:
            relation = connection.sql(f"FROM {view.name}")
            kept = [name for name in relation.columns if name not in _OF_THE_LOG]
            rows = relation.select(*kept).fetchall()
            found[view.name] = sorted(map(repr, rows))
        found["newest groups"] = connection.sql(
            "SELECT group_id FROM groups ORDER BY stream_at DESC, stream DESC, stream_seq DESC"
        ).fetchall()
        found["replayed"] = [chosen.group.group for chosen in select_groups(connection)]
    return found


async def test_one_and_eight_partitions_give_equal_answers(
    start_nats: Callable[..., NatsServer], tmp_path: Path
) -> None:
    one = await _recorded(start_nats, tmp_path / "one", 1)
    eight = await _recorded(start_nats, tmp_path / "eight", 8)
    expected, found = _answers(one), _answers(eight)
    assert sum(bool(rows) for rows in expected.values()) > 20
    assert found == expected

    # Each file holds events of one partition, and so does a merged one.
    lake = lake_in(eight.path("store"))
    before = stored_events(lake)
    assert len({stream for stream, _ in before if stream.startswith("ROLLOUTS_")}) == 8
    assert {n for _, n in before.items()} == {1}
    Maintenance(lake, eight.store).once()
    after = lake_in(eight.path("store"))
    assert stored_events(after) == before
    for table in after.tables():
        for name in after.names(table.tag):
            rows = after.storage.read(table.tag, name)
            assert set(rows["log_stream"].to_pylist()) == {name.partition("-")[0]}
    assert _answers(eight) == expected


async def test_a_partition_of_the_store_has_a_transaction_of_its_own(
    start_nats: Callable[..., NatsServer], tmp_path: Path
) -> None:
    config = await _recorded(start_nats, tmp_path / "four", 4)
    lake = lake_in(config.path("store"))
    highest: dict[str, int] = {}
    for stream, seq in stored_events(lake):
        highest[stream] = max(highest.get(stream, 0), seq)
    delta = lake.table(wire_name(TrajectoryCompleted)).snapshot()
    assert delta is not None
    for partition in range(4):
        held = delta.transaction_version(f"store-rollouts/{partition}")
        assert held is not None
        assert 0 < held <= highest[f"ROLLOUTS_{partition}"]

    # A store that lost its acknowledgements is given everything again, and writes nothing twice.
    before = stored_events(lake)
    async with Broker.connect(config.nats) as broker:
        for spec in broker.layout.consumers:
            if spec.name.startswith("store-"):
                await broker.js.delete_consumer(spec.stream, spec.durable)
    async with _running_store(config):
        pass
    assert stored_events(lake_in(config.path("store"))) == before
