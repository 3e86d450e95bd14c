"""Helpers of the store's tests: events of every kind, stores with them, and reads of a store."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest
from pyarrow import fs

from pipeline import events, streams
from pipeline.config import Config
from pipeline.errors import BrokerError
from pipeline.log.broker import Broker
from store.lake import columns
from store.lake.commits import transaction_id
from store.lake.lake import Lake, lake_in
from tests.kits.events import checkpoint as checkpoint
from tests.kits.events import completed as completed
from tests.kits.events import exchange as exchange_of
from tests.kits.events import letter, loaded
from tests.kits.events import opened as opened

StoreProcess = Callable[..., AbstractAsyncContextManager[Config]]
ACK_WAIT_S = 0.3
"""Of the consumers of stores that die: they start at once, forked."""


def exchange(trajectory: str, seq: int = 0, step: int = 0, **more: Any) -> events.ExchangeRecorded:
    request = b'{"messages": [{"role": "system", "content": "play"}, {"role": "user", "content": "go %d"}]}' % seq
    response = b'{"choices": [{"message": {"role": "assistant", "content": "x"}}]}'
    values: dict[str, Any] = {"policy_version": f"m@{step}", "step": step, "group": "g0", "started_at": 1_000_000}
    values |= {"request": request, "response": response, "logprobs": events.pack_logprobs([-0.5, -0.25])}
    return exchange_of(trajectory, seq, [1, 2, seq], [3, 4], **(values | more))


def scored(group: str, rewards: Mapping[str, float], member: Mapping[str, Any] = {}, **more: Any) -> events.GroupScored:
    """A scored group with these rewards by trajectory; `member`: fields of each member."""
    members = tuple(events.Member(trajectory=name, reward=reward, **member) for name, reward in rewards.items())
    return events.GroupScored(group=group, members=members, **{"project": "p", "model": "m", "judge": "j", **more})


def verdict(scores: Mapping[str, float] = {}, explanations: Mapping[str, str] = {}, **more: Any) -> events.Verdict:
    """What a judge said of these trajectories."""
    said = tuple(events.Score(trajectory=t, score=s, explanation=explanations.get(t, "")) for t, s in scores.items())
    values: dict[str, Any] = {"judge_model": "judge/1", "rubric": "general", "rubric_hash": "h"}
    return events.Verdict(**(values | {"scores": said, "order": tuple(scores)} | more))


def discarded(group: str, reason: Any, *trajectories: str, **more: Any) -> events.GroupDiscarded:
    values: dict[str, Any] = {"project": "p", "group": group, "model": "m", "by": "trainer"}
    return events.GroupDiscarded(**(values | {"trajectories": trajectories, "reason": reason} | more))


def signal(trajectory: str, **more: Any) -> events.SignalGiven:
    values = {"project": "p", "trajectory": trajectory, "model": "m", "group": "g", "signal": "s", "by": "me"}
    return events.SignalGiven(**(values | more))


def promoted(version: str = "m@1", **more: Any) -> events.PolicyPromoted:
    return events.PolicyPromoted(**({"project": "p", "model": "m", "version": version, "request": "q"} | more))


def evaluated(entrant: str, *measures: events.Measure, **more: Any) -> events.PolicyEvaluated:
    values: dict[str, Any] = {"project": "p", "evaluation": "e", "entrant": entrant, "model": "m", "version": entrant}
    return events.PolicyEvaluated(**(values | {"measures": measures} | more))


def what_if_answered(*variants: events.Variant, **more: Any) -> events.WhatIfAnswered:
    values: dict[str, Any] = {"project": "p", "model": "m", "question": "q", "baseline": "m@1", "evaluation": "e"}
    return events.WhatIfAnswered(**(values | {"variants": variants, "groups": 1} | more))


def shadow(trajectory: str, call: int = 0, **more: Any) -> events.ShadowAnswered:
    """An apprentice's answer that differs from that of `exchange`."""
    response = b'{"choices": [{"message": {"role": "assistant", "content": "y"}}]}'
    values: dict[str, Any] = {"project": "p", "trajectory": trajectory, "call": call, "model": "m", "outside": "master"}
    values |= {"policy_version": "m@1", "step": 1, "response": response, "same": False, "started_at": 1_000_000}
    values |= {"sampled_ids": events.pack_ids([3, 4]), "logprobs": events.pack_logprobs([-0.5, -0.25])}
    return events.ShadowAnswered(**(values | more))


def compared(trajectory: str, call: int, outside: float, apprentice: float) -> events.AnswersCompared:
    scores = {"outside_score": outside, "apprentice_score": apprentice}
    return events.AnswersCompared(project="p", trajectory=trajectory, call=call, model="m", outside="master", **scores)


def run_of_one_step() -> list[events.Event]:
    """Two trajectories of two calls, their group, its step, its load, and an event of every other kind."""
    made: list[events.Event] = []
    for name in ("t0", "t1"):
        ended: dict[str, Any] = {"reward": float(name == "t0"), "rewards": {"win": 1.0}, "metrics": {"turns": 2.0}}
        made.append(opened(name, group="g0", task="win"))
        made += [exchange(name, seq) for seq in range(2)]
        made.append(completed(name, group="g0", exchanges=2, **ended))
    cost: dict[str, Any] = {"order": ("t1", "t0"), "cost_usd": 0.25, "prompt_tokens": 10, "completion_tokens": 5}
    said = verdict({"t0": 0.9, "t1": 0.1}, {"t0": "wins"}, **cost)
    label = {"group": "g0", "signal": "me:2", "name": "label", "source": "dashboard"}
    measure, task = events.Measure(name="reward", mean=0.5, count=1), events.TaskResult(task="t", reward=0.5)
    likeliest: dict[str, Any] = {
        "top_k": 2,
        "top_ids": events.pack_ids([3, 4]),
        "top_logprobs": events.pack_logprobs([-0.5, -1.5]),
    }
    return [
        *made,
        scored("g0", {"t0": 1.0, "t1": 0.0}, {"exchanges": 2}, task="win", verdicts=(said,)),
        checkpoint(1, groups=("g0",), group_seqs=events.pack_seqs([1]), metrics={"loss": 0.5}),
        loaded(),
        promoted(),
        events.AlarmChanged(project="p", alarm="dead_letters", state="raised", since=1_000_000),
        evaluated("m@1", measure, runs=1, tasks=(task,)),
        what_if_answered(
            events.Variant(branch="b", version="m+b@1", settings='{"judge.rubric": "stricter"}', groups=1)
        ),
        discarded("g9", "stale", "t8", "t9", duration_s=4.0),
        signal("t0", group="g0", signal="me:1", call=1, value=1.0, source="api"),
        signal("t0", value=1.0, text="wins", **label),
        signal("t1", value=0.0, **label),
        events.TeacherAnswered(
            project="p", trajectory="t0", teacher="big", logprobs=events.pack_logprobs([-0.5]), **likeliest
        ),
        shadow("t0"),
        compared("t0", 0, 1.0, 0.5),
        events.JudgeMeasured(
            project="p", kind="groups", judge="j", model="judge/1", ruler="default", position_bias=0.1
        ),
        letter(7, project="p", payload=b"\xc1"),
    ]


async def publish(broker: Broker, new: Iterable[events.Event]) -> None:
    for event in new:
        await broker.publish(event)


def fill(where: Path | Lake, *new: events.Event) -> Lake:
    """The store of a run directory, or the lake, to which events are added: one file a tag, sequences counted per
    stream."""
    lake = lake_in(where / "store") if isinstance(where, Path) else where
    counts: dict[str, int] = {}
    for table in lake.tables():
        stream = streams.stream_of_subject(table.tag)
        last = delta.transaction_version(transaction_id(table.tag)) if (delta := table.snapshot()) else 0
        counts[stream] = max(counts.get(stream, 0), last or 0)
    by_tag: dict[str, list[tuple[int, events.Event]]] = {}
    for event in new:
        tag = events.wire_name(event)
        stream = streams.stream_of_subject(tag)
        counts[stream] = counts.get(stream, 0) + 1
        by_tag.setdefault(tag, []).append((counts[stream], event))
    for tag, rows in by_tag.items():
        seqs = [s for s, _ in rows]
        trace = ["00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"] * len(rows)
        table = columns.table(tag, [e for _, e in rows], seqs, seqs, trace)  # type: ignore[misc]
        lake.table(tag).append(table)
    return lake


def stored(where: Path | Lake, tag: str) -> list[int]:
    """Stream sequences of all rows in a lake, or in the folder of one, sorted."""
    lake = where if isinstance(where, Lake) else lake_in(where)
    return sorted(s for t in tables(lake, tag) for s in t["log_seq"].to_pylist())


def tables(lake: Lake, tag: str) -> list[pa.Table]:
    """The rows of each file that readers see."""
    return [lake.storage.read(tag, name) for name in lake.names(tag)]


def files_there(lake: Lake, tag: str) -> set[str]:
    """Names of the Parquet files of a tag's folder, those that no commit names included."""
    there = lake.storage.files.get_file_info(fs.FileSelector(f"{lake.storage.root}/{tag}", allow_not_found=True))
    return {info.base_name for info in there if info.base_name.endswith(".parquet")}


async def until_acked(broker: Broker, within_s: float = 60) -> None:
    """Waits until the store's consumers have nothing pending and nothing unacknowledged."""
    with anyio.fail_after(within_s):
        while True:
            with suppress(BrokerError):  # a consumer is about to be made anew
                if not await broker.lag("store-"):
                    return
            await anyio.sleep(0.02)


async def until_waiting(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """Wait until a store says that it can't write. Returns the fields of the log line."""
    with anyio.fail_after(60):
        while not (said := [r for r in caplog.records if r.getMessage() == "events not written; trying again"]):
            await anyio.sleep(0.02)
    return dict(said[0].fields)  # type: ignore[attr-defined]


def stored_events(lake: Lake) -> Counter[tuple[str, int]]:
    """(stream, sequence) of every row of every file that readers see."""
    found: Counter[tuple[str, int]] = Counter()
    for tag in events.schema.tables():
        found.update((streams.stream_of_subject(tag), s) for s in stored(lake, tag))
    return found


async def store_all(broker: Broker, running_store: StoreProcess) -> None:
    """Let a store run until it has written all that is on the log."""
    async with running_store():
        await until_acked(broker)


@contextmanager
def serving_s3() -> Iterator[str]:
    """URL of an S3-compatible server without buckets."""
    command = [sys.executable, "-m", "tests.store.s3_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()
            process.wait(60)


def create_bucket(url: str) -> None:
    """Make the bucket `journeywork` at the S3-compatible server `url`."""
    client = fs.S3FileSystem(endpoint_override=url, scheme="http", region="us-east-1", allow_bucket_creation=True)
    client.create_dir("journeywork")
