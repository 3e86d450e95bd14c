"""Events of every kind, made from a seed, and a store to put them into."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from pyarrow import fs

from pipeline.config import Config, NatsConfig, StoreConfig
from pipeline.events import (
    CheckpointPublished,
    DeadLettered,
    Event,
    ExchangeRecorded,
    GroupDiscarded,
    GroupScored,
    Member,
    PolicyLoaded,
    PolicyPromoted,
    Score,
    TrajectoryCompleted,
    TrajectoryOpened,
    Verdict,
    pack_ids,
    pack_logprobs,
    pack_seqs,
)
from pipeline.log.broker import Broker
from store.service import serve

StoreProcess = Callable[..., AbstractAsyncContextManager[Config]]


def exchange(trajectory: str, seq: int = 0, step: int = 0, **more: Any) -> ExchangeRecorded:
    request = (
        b'{"messages": [{"role": "system", "content": "play"}, {"role": "user", "content": "go %d"}]}' % seq
    )
    response = b'{"choices": [{"message": {"role": "assistant", "content": "x"}}]}'
    values: dict[str, Any] = {
        "project": "p",
        "trajectory": trajectory,
        "seq": seq,
        "model": "m",
        "policy_version": f"m@{step}",
        "step": step,
        "group": "g0",
        "request": request,
        "response": response,
        "prompt_ids": pack_ids([1, 2, seq]),
        "sampled_ids": pack_ids([3, 4]),
        "logprobs": pack_logprobs([-0.5, -0.25]),
        "started_at": 1_000_000,
    }
    return ExchangeRecorded(**(values | more))


def run_of_one_step() -> list[Event]:
    """Two trajectories of two calls, their group, its step, its load: everything that happens once."""
    made: list[Event] = []
    for name in ("t0", "t1"):
        made.append(TrajectoryOpened(project="p", trajectory=name, model="m", group="g0", task="win"))
        made += [exchange(name, seq) for seq in range(2)]
        made.append(
            TrajectoryCompleted(
                project="p",
                trajectory=name,
                model="m",
                group="g0",
                exchanges=2,
                reward=float(name == "t0"),
                rewards={"win": 1.0},
                metrics={"turns": 2.0},
            )
        )
    made.append(
        GroupScored(
            project="p",
            group="g0",
            model="m",
            task="win",
            judge="j",
            members=tuple(Member(trajectory=t, reward=r, exchanges=2) for t, r in (("t0", 1.0), ("t1", 0.0))),
            verdicts=(
                Verdict(
                    judge_model="judge/1",
                    rubric="general",
                    rubric_hash="h",
                    order=("t1", "t0"),
                    cost_usd=0.25,
                    prompt_tokens=10,
                    completion_tokens=5,
                    scores=(
                        Score(trajectory="t0", score=0.9, explanation="wins"),
                        Score(trajectory="t1", score=0.1),
                    ),
                ),
            ),
        )
    )
    made.append(
        CheckpointPublished(
            project="p",
            model="m",
            step=1,
            version="m@1",
            parent="m@0",
            batch_id="b",
            groups=("g0",),
            group_seqs=pack_seqs([1]),
            config_hash="c",
            adapter="a",
            adapter_sha256="s",
            adapter_bytes=3,
            metrics={"loss": 0.5},
        )
    )
    made.append(
        PolicyLoaded(project="p", model="m", step=1, version="m@1", replica="r0", probe_delta=0.5, load_s=0.1)
    )
    made.append(PolicyPromoted(project="p", model="m", version="m@1", request="q"))
    made.append(
        GroupDiscarded(
            project="p",
            group="g9",
            model="m",
            trajectories=("t8", "t9"),
            reason="stale",
            by="trainer",
            duration_s=4.0,
        )
    )
    made.append(
        DeadLettered(
            project="p",
            stream="ROLLOUTS",
            stream_seq=7,
            original_subject="rollout.x",
            consumer="judge",
            reason="undecodable",
            payload=b"\xc1",
        )
    )
    return made


async def publish(broker: Broker, events: Iterable[Event]) -> None:
    for event in events:
        await broker.publish(event)


@pytest.fixture
def running_store(nats_config: NatsConfig, tmp_path: Path) -> StoreProcess:
    """`async with running_store() as config`: a store in this process, stopped as by SIGTERM at the end."""

    @asynccontextmanager
    async def run(**settings: Any) -> AsyncIterator[Config]:
        config = Config(
            run_dir=str(tmp_path), nats=nats_config, store=StoreConfig(**({"flush_s": 0.2} | settings))
        )
        (tmp_path / "store").mkdir(exist_ok=True)
        ready = anyio.Event()

        def on_ready(**_: str | int | float) -> None:
            ready.set()

        async with anyio.create_task_group() as tg:
            tg.start_soon(serve, config, on_ready)
            await ready.wait()
            yield config
            tg.cancel_scope.cancel()

    return run


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """URL of an S3-compatible server with the bucket `journeyman`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.store.s3_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


@pytest.fixture
def object_store(s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Settings of `[store]` for a prefix of a test's own."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    client = fs.S3FileSystem(
        endpoint_override=s3_server, scheme="http", region="us-east-1", allow_bucket_creation=True
    )
    client.create_dir("journeyman")
    return {"dir": f"s3://journeyman/{tmp_path.name}", "s3_endpoint": s3_server, "s3_region": "us-east-1"}
