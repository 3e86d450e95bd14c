"""Groups from files: to score, or with known rewards to measure a judge's agreement with them.

`GroupFile` is the form of a group in a file (docs/judging.md). `judge.commands.score` and `serve` score such groups.
`judge.commands.eval` and the judge's monitor read labelled ones, in which each trajectory has its true reward, and
measure how well a judge orders them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from judge.ruler.aggregation import pair_signs, sign
from judge.ruler.transcripts import Transcript
from pipeline.chat.conversations import Conversation, Reply
from pipeline.config import ConfigError


class GroupMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One trajectory of a group."""

    id: str = ""
    """Its number in the group, counted from 1, if empty."""
    messages: list[dict[str, Any]] = []
    """Each of role `assistant` is the reply to one call. Calls are counted from 0."""
    conversations: list[list[dict[str, Any]]] = []
    """Instead of `messages`, if there were several: sub-agents, or one before and one after the history was
    shortened."""
    reward: float | None = None
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    metadata: dict[str, Any] = {}


class GroupFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of trajectories to compare with each other."""

    trajectories: list[GroupMember]
    id: str = ""
    task: str = ""
    messages: list[dict[str, Any]] = []
    """Messages that all trajectories begin with."""
    tools: list[dict[str, Any]] = []

    def transcripts(self) -> dict[str, Transcript]:
        """Return the transcripts by id. Raises `ConfigError` if the trajectories cannot be compared."""
        transcripts: dict[str, Transcript] = {}
        tools = tuple(self.tools)
        for number, attempt in enumerate(self.trajectories, 1):
            name = attempt.id or str(number)
            if name in transcripts:
                raise ConfigError(f"two trajectories have the id {name!r}")
            if attempt.messages and attempt.conversations:
                raise ConfigError(f"trajectory {name}: give messages or conversations, not both")
            first, *others = attempt.conversations or [attempt.messages]
            parts, call = list[Conversation](), 0
            for number, messages in enumerate([[*self.messages, *first], *others], 1):
                start = len(self.messages) if number == 1 else 0
                places = [i for i in range(start, len(messages)) if messages[i].get("role") == "assistant"]
                stops = [*places[1:], len(messages)]
                replies = (Reply(call + n, *ends) for n, ends in enumerate(zip(places, stops, strict=False)))
                parts.append(Conversation(tuple(messages), tools, f"part {number}", tuple(replies)))
                call += len(places)
            transcripts[name] = Transcript(name, tuple(parts))
        if not transcripts:
            raise ConfigError("a group needs at least one trajectory")
        return transcripts


@dataclass(frozen=True)
class LabelledGroup:
    """Trajectories and their true rewards."""

    id: str
    transcripts: tuple[Transcript, ...]
    rewards: Mapping[str, float]


def read_labelled(path: Path) -> list[LabelledGroup]:
    """Read one group with rewards from each line of a JSONL file. Raises `ConfigError` naming file and line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    groups = []
    for number, text in enumerate(lines, 1):
        if text.strip():
            try:
                groups.append(_labelled(msgspec.json.decode(text, type=GroupFile), f"line-{number}"))
            except (msgspec.DecodeError, ConfigError) as error:
                raise ConfigError(f"{path}:{number}: {error}") from error
    if not groups:
        raise ConfigError(f"{path}: there is no group in it")
    return groups


def _labelled(group: GroupFile, default_id: str) -> LabelledGroup:
    """Return a group of a labelled file with its true rewards; `default_id` names it if it has no id. Raises
    `ConfigError` for less than two trajectories, or one without a finite reward."""
    if len(group.trajectories) < 2:
        raise ConfigError(
            "a group with known rewards needs at least 2 trajectories, because they are compared with each other"
        )
    name = group.id or default_id
    # The ids seed the orders in which the group is judged, so they have to differ from those of other groups.
    transcripts = [replace(t, trajectory=f"{name}/{i}") for i, t in group.transcripts().items()]
    rewards = {}
    for transcript, attempt in zip(transcripts, group.trajectories, strict=True):
        if attempt.reward is None or not math.isfinite(attempt.reward):
            raise ConfigError(f"trajectory {transcript.trajectory} has no finite reward")
        rewards[transcript.trajectory] = attempt.reward
    return LabelledGroup(name, tuple(transcripts), rewards)


@dataclass(frozen=True)
class Agreement:
    """How well scores agree with the true rewards. A figure is `None` where no group's rewards differ."""

    groups: int
    kendall_tau: float | None
    """Tau-b, -1..1, mean over the groups in which rewards differ. A judge that gives all the same score has 0."""
    pairwise_accuracy: float | None
    """Share of the pairs with different rewards that the judge ordered correctly; a tie counts half."""
    sign_flips: float | None
    """Share of trajectories above or below the group's mean that the judge put on the other side of its own mean. They
    would train in the wrong direction."""


def measure_agreement(groups: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> Agreement:
    """Compare the true rewards with the scores of each group, both by trajectory."""
    taus: list[float] = []
    correct_pairs, pairs, flips, with_side = 0.0, 0, 0, 0
    for truth, scores in groups:
        signs = pair_signs(truth, scores)
        differing = sum(t != 0 for t, _ in signs)
        if differing:
            scale = math.sqrt(differing * sum(s != 0 for _, s in signs))
            taus.append(sum(t * s for t, s in signs) / scale if scale else 0.0)
        pairs += differing
        correct_pairs += sum((1 + t * s) / 2 for t, s in signs if t)
        true_mean, score_mean = fmean(truth.values()), fmean(scores[n] for n in truth)
        sides = [(sign(truth[n] - true_mean), sign(scores[n] - score_mean)) for n in truth]
        with_side += sum(t != 0 for t, _ in sides)
        flips += sum(t * s < 0 for t, s in sides)
    return Agreement(
        len(groups),
        fmean(taus) if taus else None,
        correct_pairs / pairs if pairs else None,
        flips / with_side if with_side else None,
    )
