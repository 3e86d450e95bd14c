"""What signals say about a run: the value of a reward, rewards of single calls, hints, and who graded it.

Of several numbers that one key gave under one name about the same thing, the last counts. Those of different keys are
averaged. A number about a call is a reward of that call if settings name it as a reward of kind `feedback`, or if it is
called `reward` and the run's owner gave it. Words and corrections are hints, whatever they are called.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from pipeline.config import JudgeConfig
from pipeline.events import Hint, SignalGiven, TrajectoryCompleted
from pipeline.events.types import MAX_NUMBER

OWN_REWARD = "reward"
"""Name of a number about a call that is that call's reward if the run's owner gave it."""


@dataclass(frozen=True)
class RunFeedback:
    """What signals, reward functions or a judge of what happened next say about one run and its calls."""

    call_rewards: Mapping[str, float] = field(default_factory=dict)
    """As in `Member`."""
    hints: tuple[Hint, ...] = ()
    graders: Mapping[str, float] = field(default_factory=dict)


def merge(parts: Iterable[RunFeedback]) -> RunFeedback:
    """Return what several sources say about one run: the sum of a call's rewards, and all hints in this order."""
    call_rewards: dict[str, float] = defaultdict(float)
    graders: dict[str, float] = {}
    hints: list[Hint] = []
    for part in parts:
        for call, reward in part.call_rewards.items():
            call_rewards[call] += reward
        hints += part.hints
        graders.update(part.graders)
    return RunFeedback(dict(call_rewards), tuple(hints), graders)


def graded(signals: Iterable[SignalGiven], name: str, call: int = -1) -> dict[str, float]:
    """Return the last number that each key gave under `name` about a call, or about the run; by the key's name.
    `signals`: those of one run, in the order of the log."""
    return {
        s.by: s.value
        for s in signals
        if (s.kind, s.name, s.call) == ("number", name, call)
        and s.value is not None
        and abs(s.value) <= MAX_NUMBER
    }


def by_run(signals: Iterable[SignalGiven]) -> dict[str, list[SignalGiven]]:
    """Return the signals of each run."""
    found: dict[str, list[SignalGiven]] = defaultdict(list)
    for signal in signals:
        found[signal.trajectory].append(signal)
    return found


def feedback_on(
    members: Sequence[TrajectoryCompleted], signals: Sequence[SignalGiven], config: JudgeConfig
) -> dict[str, RunFeedback]:
    """Return what signals say about each of `members` that they are about."""
    said = by_run(signals)
    weights = {r.name: r.weight for r in config.rewards if r.kind == "feedback"}
    total = math.fsum(abs(r.weight) for r in config.rewards if r.kind != "next_state") or 1.0
    found = {}
    for member in members:
        if not (own := said.get(member.trajectory)):
            continue
        call_rewards: dict[str, float] = {}
        graders: dict[str, float] = defaultdict(float)
        for call in sorted({s.call for s in own if s.kind == "number"}):
            for name, weight in weights.items():
                if values := graded(own, name, call):
                    # Where parts are added, each decides its share; a product or a minimum can hang on each of them.
                    share = abs(weight) / total if config.combine in ("mean", "sum") else 1.0
                    for by in values:
                        graders[by] = min(graders[by] + share / len(values), 1.0)
                    if call >= 0:
                        call_rewards[str(call)] = call_rewards.get(str(call), 0.0) + weight * fmean(
                            values.values()
                        )
            if call >= 0 and OWN_REWARD not in weights:
                reward = graded(own, OWN_REWARD, call).get(member.owner)
                if reward is not None:
                    call_rewards[str(call)] = call_rewards.get(str(call), 0.0) + reward
        hints = tuple(
            Hint(call=s.call, text=s.text, kind="correction" if s.kind == "correction" else "text")
            for s in own
            if s.kind in ("text", "correction") and s.text
        )
        found[member.trajectory] = RunFeedback(call_rewards, hints, dict(graders))
    return found
