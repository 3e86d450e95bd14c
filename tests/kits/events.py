"""Events for tests, of project `p`, model `m` and group `g`."""

from collections.abc import Sequence
from typing import Any

from pipeline.events import (
    CheckpointPublished,
    DeadLettered,
    ExchangeRecorded,
    PolicyLoaded,
    TrajectoryCompleted,
    TrajectoryOpened,
    pack_ids,
    pack_logprobs,
)


def opened(trajectory: str, **more: Any) -> TrajectoryOpened:
    return TrajectoryOpened(**({"project": "p", "trajectory": trajectory, "model": "m", "group": "g"} | more))


def exchange(
    trajectory: str = "t1", seq: int = 0, prompt: Sequence[int] = (1, 2), sampled: Sequence[int] = (3,), **more: Any
) -> ExchangeRecorded:
    """A call with these token ids. Each sampled token has the logprob -0.5."""
    values: dict[str, Any] = {"project": "p", "trajectory": trajectory, "seq": seq, "request": b"{}", "response": b"{}"}
    values |= {"model": "m", "policy_version": "m@0", "step": 0}
    values |= {"prompt_ids": pack_ids(prompt), "sampled_ids": pack_ids(sampled)}
    return ExchangeRecorded(**(values | {"logprobs": pack_logprobs([-0.5] * len(sampled))} | more))


def completed(trajectory: str = "t1", **more: Any) -> TrajectoryCompleted:
    return TrajectoryCompleted(**({"project": "p", "trajectory": trajectory, "model": "m", "group": "g"} | more))


def checkpoint(step: int = 1, model: str = "m", **more: Any) -> CheckpointPublished:
    values: dict[str, Any] = {"project": "p", "model": model, "step": step, "version": f"{model}@{step}"}
    values |= {"parent": f"{model}@{step - 1}", "batch_id": f"b{step}", "groups": (), "config_hash": "c"}
    values |= {"adapter": f"a{step}", "adapter_sha256": f"{step}", "adapter_bytes": 1}
    return CheckpointPublished(**(values | more))


def loaded(step: int = 1, model: str = "m", **more: Any) -> PolicyLoaded:
    values: dict[str, Any] = {"project": "p", "model": model, "step": step, "version": f"{model}@{step}"}
    return PolicyLoaded(**({**values, "replica": "r0", "probe_delta": 0.5, "load_s": 0.1} | more))


def letter(stream_seq: int = 1, **more: Any) -> DeadLettered:
    """A message that the judge gave up."""
    values = {"project": "", "stream": "ROLLOUTS", "original_subject": "rollout.x", "consumer": "judge"}
    return DeadLettered(**({**values, "stream_seq": stream_seq, "reason": "undecodable"} | more))
