"""A checkpoint as a row of figures."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pipeline.events import CheckpointPublished
from pipeline.log.messages import Place, Recorded

ALIASES = {
    "loss": "loss/train",
    "entropy": "loss/entropy",
    "kl": "loss/kl_div",
    "grad_norm": "loss/grad_norm",
    "learning_rate": "loss/learning_rate",
    "step_s": "time/step_trainer_s",
    "tokens": "data/step_trainer_tokens",
    "trajectories": "data/step_num_trajectories",
    "groups": "data/step_num_groups_trainable",
    "reward_mean_all": "train/reward",
    "val_reward_mean": "val/reward",
}
"""ART's names of the trainer's metrics."""

Key = tuple[str, str, int]
"""Model, branch, step."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `metrics.jsonl`."""

    model: str
    branch: str
    step: int
    version: str
    at: float
    """Time of the checkpoint, in seconds since the Unix epoch."""
    log_seq: int
    log_at: int
    """Where its event lies in stream POLICY: sequence, and time in microseconds."""
    metrics: dict[str, float | None]
    """The trainer's metrics as `trainer/<name>`, and those that ART has a name for under that name too. `null`: no
    number."""

    @property
    def key(self) -> Key:
        return (self.model, self.branch, self.step)

    @property
    def place(self) -> Place:
        return Place(self.log_seq, self.log_at)


def named(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return the trainer's metrics by the names of curves."""
    found: dict[str, float | None] = {f"trainer/{name}": value for name, value in metrics.items()}
    return found | {ALIASES[name]: value for name, value in metrics.items() if name in ALIASES}


def make_row(recorded: Recorded[CheckpointPublished]) -> Row:
    event, place = recorded.event, recorded.place
    return Row(
        model=event.model, branch=event.branch, step=event.step, version=event.version, at=event.at / 1e6,
        log_seq=place.seq, log_at=place.at, metrics=named(event.metrics),
    )  # fmt: skip
