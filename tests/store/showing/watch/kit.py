"""A run to watch: its store and its state."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pipeline.config import Config, ModelConfig, VllmConfig, save
from pipeline.events import (
    AlarmChanged,
    CheckpointPublished,
    DeadLettered,
    Event,
    GroupScored,
    Member,
    PolicyLoaded,
    PolicyUnloaded,
    Score,
    TrajectoryCompleted,
    TrajectoryOpened,
    Verdict,
    now_us,
)
from tests.store.kit import exchange, fill

REPLICA = "10.0.0.1:8000"


def step(number: int, reward: float) -> CheckpointPublished:
    """A step with its metrics."""
    return CheckpointPublished(
        project="p", model="m", step=number, version=f"m@{number}", parent=f"m@{number - 1}", batch_id=f"b{number}",
        groups=(), config_hash="c", adapter="a", adapter_sha256="s", adapter_bytes=1,
        metrics={"reward_mean_all": reward, "staleness_mean": 0.25, "entropy": 1.5, "kl": 0.125},
    )  # fmt: skip


def loaded(number: int) -> PolicyLoaded:
    """The version on the replica."""
    return PolicyLoaded(project="p", model="m", step=number, version=f"m@{number}", replica=REPLICA)


def events(steps: int = 30) -> list[Event]:
    """A run of `steps` steps: 120 of 123 runs ended, one of two groups scored, one dead letter, one alarm."""
    now = now_us()
    score = Verdict(judge_model="j", scores=(Score(trajectory="t0", score=1.0),), cost_usd=0.25)
    made: list[Event] = []
    for i in range(123):
        opened = {
            "project": "p",
            "trajectory": f"t{i}",
            "model": "m",
            "group": "g0" if i < 60 else "g1",
            "task": "t",
        }
        made.append(TrajectoryOpened(**opened, at=now))
        if i < 120:
            made.append(TrajectoryCompleted(**opened, exchanges=1, reward=1.0, at=now, opened_at=now))
    made += [exchange("t0", seq, at=now) for seq in range(6)]
    made.append(
        GroupScored(
            project="p", group="g0", model="m", judge="j", members=(Member(trajectory="t0", reward=1.0),),
            verdicts=(score,),
        )
    )  # fmt: skip
    made += [step(i, i / steps) for i in range(1, steps + 1)]
    made += [
        loaded(steps - 1),
        loaded(steps),
        PolicyUnloaded(project="p", model="m", version="m@1", replica=REPLICA),
    ]
    made.append(
        DeadLettered(
            project="",
            stream="ROLLOUTS",
            stream_seq=1,
            original_subject="x",
            consumer="judge",
            reason="undecodable",
        )
    )
    made.append(
        AlarmChanged(
            project="p", alarm="kl_rise", state="raised", model="m", value=9.0, threshold=2.0, detail="it is far",
            since=now, at=now,
        )
    )  # fmt: skip
    return made


def make_run(folder: Path, made: list[Event], **state: Any) -> Config:
    """A run directory with these events, as `journeywork up` leaves it while it runs as this process."""
    config = Config(
        run_dir=str(folder), models=(ModelConfig(name="m"),), vllm=VllmConfig(urls=(f"http://{REPLICA}",))
    )
    folder.mkdir(exist_ok=True)
    save(config, folder / "config.toml")
    fill(folder, made)
    services = {name: {"pid": os.getpid(), "state": "ready", "restarts": 0} for name in ("gateway", "store")}
    urls = {"gateway": "http://127.0.0.1:8700", "ui": "http://127.0.0.1:8701", "nats": "", "vllm": []}
    (folder / "state.json").write_text(
        json.dumps(
            {"pid": os.getpid(), "ready": True, "urls": urls, "services": services, "alarms": [], **state}
        )
    )
    return config
