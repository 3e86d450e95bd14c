"""Events for tests, of project `p`, model `m` and group `g`."""

from __future__ import annotations

from typing import Any

from pipeline.events import (
    CheckpointPublished,
    ExchangeRecorded,
    TrajectoryCompleted,
    TrajectoryOpened,
    pack_ids,
    pack_logprobs,
)


def opened(trajectory: str, **more: Any) -> TrajectoryOpened:
    return TrajectoryOpened(**({"project": "p", "trajectory": trajectory, "model": "m", "group": "g"} | more))


def exchange(trajectory: str = "t1", seq: int = 0, **more: Any) -> ExchangeRecorded:
    values: dict[str, Any] = {
        "project": "p",
        "trajectory": trajectory,
        "seq": seq,
        "model": "m",
        "policy_version": "m@0",
        "step": 0,
        "request": b"{}",
        "response": b"{}",
        "prompt_ids": pack_ids([1, 2]),
        "sampled_ids": pack_ids([3]),
        "logprobs": pack_logprobs([-0.5]),
    }
    return ExchangeRecorded(**(values | more))


def completed(trajectory: str = "t1", **more: Any) -> TrajectoryCompleted:
    return TrajectoryCompleted(**({"project": "p", "trajectory": trajectory, "model": "m", "group": "g"} | more))


def checkpoint(step: int = 1, model: str = "m", **more: Any) -> CheckpointPublished:
    values: dict[str, Any] = {
        "project": "p",
        "model": model,
        "step": step,
        "version": f"{model}@{step}",
        "parent": f"{model}@{step - 1}",
        "batch_id": f"b{step}",
        "groups": (),
        "config_hash": "c",
        "adapter": f"a{step}",
        "adapter_sha256": f"{step}",
        "adapter_bytes": 1,
    }
    return CheckpointPublished(**(values | more))
