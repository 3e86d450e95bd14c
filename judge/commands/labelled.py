"""Groups with known rewards: a file of them, and how well a judge's scores agree with it.

One JSON object a line:

    {"id": "g1", "messages": [what all share], "tools": [],
     "trajectories": [{"messages": [what this one said], "reward": 1.0}, …]}

`messages` and `tools` may be left out. `trajectories` has at least two entries with a finite `reward` each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from judge.ruler.transcripts import Transcript
from pipeline.config import ConfigError

TIE = 1e-6
"""Rewards closer than this are equal."""


class LabelledError(ConfigError):
    """A labelled file that can't be used; the message names file and line."""


class _Trajectory(msgspec.Struct, frozen=True):
    messages: list[dict[str, Any]]
    reward: float


class _Line(msgspec.Struct, frozen=True):
    trajectories: list[_Trajectory]
    id: str = ""
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []


@dataclass(frozen=True)
class LabelledGroup:
    """Trajectories and what each is truly worth."""

    id: str
    transcripts: tuple[Transcript, ...]
    rewards: Mapping[str, float]


def read_labelled(path: Path) -> list[LabelledGroup]:
    """Raises `LabelledError`."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise LabelledError(f"{path}: {error.strerror}") from error
    groups = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=_Line)
        except msgspec.DecodeError as error:
            raise LabelledError(f"{path}:{number}: {error}") from error
        if len(line.trajectories) < 2 or not all(math.isfinite(t.reward) for t in line.trajectories):
            raise LabelledError(f"{path}:{number}: a group needs at least 2 trajectories with finite rewards")
        name = line.id or f"line-{number}"
        shared, tools = tuple(line.messages), tuple(line.tools)
        transcripts = tuple(
            Transcript(f"{name}/{i}", (*shared, *t.messages), tools) for i, t in enumerate(line.trajectories)
        )
        rewards = {t.trajectory: r.reward for t, r in zip(transcripts, line.trajectories, strict=True)}
        groups.append(LabelledGroup(name, transcripts, rewards))
    if not groups:
        raise LabelledError(f"{path}: there is no group in it")
    return groups


@dataclass(frozen=True)
class Agreement:
    """How far scores agree with the truth, over groups."""

    groups: int
    kendall_tau: float
    """Tau-b, mean over the groups in which rewards differ; -1..1. A judge that ties all has 0."""
    pairwise_accuracy: float
    """Share of pairs with different rewards that the judge put into their order; a tie counts half."""
    sign_flips: float
    """Share of trajectories off the group's mean that the judge put on the other side of its own mean: they would
    train the wrong way."""


def agreement(groups: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> Agreement:
    """Of (truth, scores) by group."""
    taus: list[float] = []
    right, pairs, flips, counted = 0.0, 0, 0, 0
    for truth, scores in groups:
        names = sorted(truth)
        concordant = discordant = tied_truth = tied_scores = 0
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                t, s = _sign(truth[a] - truth[b]), _sign(scores[a] - scores[b])
                concordant += t * s > 0
                discordant += t * s < 0
                tied_truth += t == 0
                tied_scores += s == 0
                if t != 0:
                    pairs += 1
                    right += 1.0 if t == s else (0.5 if s == 0 else 0.0)
        total = len(names) * (len(names) - 1) // 2
        if tied_truth < total:
            scale = math.sqrt((total - tied_truth) * (total - tied_scores))
            taus.append((concordant - discordant) / scale if scale else 0.0)
        true_mean, score_mean = fmean(truth.values()), fmean(scores[n] for n in names)
        for name in names:
            t, s = _sign(truth[name] - true_mean), _sign(scores[name] - score_mean)
            counted += t != 0
            flips += t * s < 0
    return Agreement(
        len(groups),
        fmean(taus) if taus else 0.0,
        right / pairs if pairs else 0.0,
        flips / counted if counted else 0.0,
    )


def _sign(value: float) -> int:
    return 0 if abs(value) <= TIE else (1 if value > 0 else -1)
