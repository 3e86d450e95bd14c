"""Events and rows for the tests of the curves."""

from __future__ import annotations

from typing import Literal

from pipeline.events import CheckpointPublished, Measure, PolicyEvaluated
from store.showing.curves.rows import Row
from tests.store import kit


def checkpoint(step: int, *, branch: str = "main", model: str = "m", loss: float = 0.5) -> CheckpointPublished:
    return kit.checkpoint(
        step,
        model=model,
        version=f"{model}@{step}",
        branch=branch,
        at=step * 1_000_000,
        metrics={"loss": loss, "reward_mean_all": step / 10, "kl_sampler": 0.001},
    )


def evaluation(
    version: str, mean: float, *, name: str = "e", kind: Literal["policy", "external"] = "policy"
) -> PolicyEvaluated:
    return PolicyEvaluated(
        project="p",
        model="m",
        evaluation=name,
        entrant=version,
        version=version,
        kind=kind,
        at=9_000_000,
        scenarios="games.agent:held_out",
        measures=(Measure(name="reward", mean=mean, low=mean - 0.25, high=None),),
    )


def row(step: int, *, model: str = "m", branch: str = "main", at: int = 0) -> Row:
    return Row(
        model=model,
        branch=branch,
        step=step,
        version=f"{model}@{step}",
        at=float(step),
        log_seq=step,
        log_at=at or step,
        metrics={"loss/train": step / 10, "train/reward": None},
    )
