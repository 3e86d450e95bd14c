"""What signals say about a run: the value of a reward, rewards of single calls, hints, and who graded it.

A signal (`rollout.signal`) is a number, a text or a correction that the agent, a user or another program gave about a
run or one of its calls, each with an API key, under a name. `judge.rewards.compose` reads here the value of a reward of
kind `feedback`, and `judge.scoring` what else a scored group says of its members.

Of several numbers that one key gave under one name about the same thing, the last counts. Those of different keys are
averaged. A number about a call is a reward of that call if settings name it as a reward of kind `feedback`, or if it is
called `reward`, no reward of kind `feedback` has that name, and the run's owner gave it. Words and corrections are
hints, whatever they are called.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from judge.reward_parts import is_usable
from pipeline.config import JudgeConfig, RewardConfig
from pipeline.events import Hint, SignalGiven, TrajectoryCompleted
from pipeline.events.signal import OWN_REWARD


@dataclass(frozen=True)
class RunFeedback:
    """What signals, reward functions or a judge of what happened next say about one run and its calls."""

    call_rewards: Mapping[str, float] = field(default_factory=dict)
    """As in `Member`."""
    hints: tuple[Hint, ...] = ()
    graded_by: tuple[str, ...] = ()
    """As in `Member`."""


def merge_feedback(parts: Iterable[RunFeedback]) -> RunFeedback:
    """Return what several parts of a reward say about one run: the sum of a call's rewards, and all hints in this
    order."""
    said = list(parts)
    return RunFeedback(_sum_by_call(p.call_rewards for p in said), tuple(hint for p in said for hint in p.hints))


def _sum_by_call(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up rewards of calls, which are given by the calls' numbers."""
    total: dict[str, float] = defaultdict(float)
    for part in parts:
        for call, reward in part.items():
            total[call] += reward
    return dict(total)


def numbers_by_key(signals: Iterable[SignalGiven], name: str, call: int = -1) -> dict[str, float]:
    """Return the last number that each key gave under `name` about a call, or about the run; by the key's name.
    `signals`: those of one run, in the order of the log."""
    about = [s for s in signals if (s.kind, s.name, s.call) == ("number", name, call)]
    return {s.by: s.value for s in about if is_usable(s.value)}


def feedback_value(signals: Iterable[SignalGiven], reward: RewardConfig) -> float | None:
    """Return the value of a reward of kind `feedback` for a run with these signals."""
    numbers = numbers_by_key(signals, reward.name)
    return fmean(numbers.values()) if numbers else reward.default


def counted_signals(signals: Iterable[SignalGiven], config: JudgeConfig) -> list[SignalGiven]:
    """Return the signals that the judge reads: not the numbers of keys that the reward of their name does not take
    (`judge.rewards.by`). Without this, any key that may give feedback could speak before the one that knows the
    result."""
    takes = {r.name: r.by for r in config.rewards if r.kind == "feedback" and r.by}
    return [s for s in signals if s.kind != "number" or s.by in takes.get(s.name, (s.by,))]


def signals_by_run(signals: Iterable[SignalGiven]) -> dict[str, list[SignalGiven]]:
    """Return the signals of each run."""
    signals_of: dict[str, list[SignalGiven]] = defaultdict(list)
    for signal in signals:
        signals_of[signal.trajectory].append(signal)
    return signals_of


def feedback_on(
    members: Sequence[TrajectoryCompleted],
    signals: Sequence[SignalGiven],
    config: JudgeConfig,
    known: Mapping[str, RunFeedback],
) -> dict[str, RunFeedback]:
    """Return what is known about each of `members`, by trajectory: what `signals` say, added to `known`, what reward
    functions and the judge of what happened next say."""
    said, feedback = signals_by_run(signals), dict(known)
    for member in members:
        if not (own := said.get(member.trajectory)):
            continue
        earlier = known.get(member.trajectory, RunFeedback())
        hints = (hint_of(s) for s in own if s.kind in ("text", "correction") and s.text)
        calls = _sum_by_call((earlier.call_rewards, _call_rewards(member, own, config)))
        feedback[member.trajectory] = RunFeedback(calls, (*earlier.hints, *hints), _graders(own, config))
    return feedback


def hint_of(signal: SignalGiven) -> Hint:
    """Return the hint that a signal of kind `text` or `correction` is."""
    return Hint(
        call=signal.call,
        text=signal.text,
        kind="correction" if signal.kind == "correction" else "text",
        by=signal.by,
        version=signal.version,
    )


def _graders(own: Iterable[SignalGiven], config: JudgeConfig) -> tuple[str, ...]:
    """Return the keys whose numbers rewards of kind `feedback` are made of."""
    names = {r.name for r in config.rewards if r.kind == "feedback"}
    graders = {s.by for s in own if s.kind == "number" and s.name in names and is_usable(s.value)}
    return tuple(sorted(graders))


def _call_rewards(member: TrajectoryCompleted, own: Sequence[SignalGiven], config: JudgeConfig) -> dict[str, float]:
    """Return the rewards that the run's `own` signals give to its calls, by the calls' numbers; the rule is in this
    module's docstring."""
    weights = {r.name: r.weight for r in config.rewards if r.kind == "feedback"}
    rewards: dict[str, float] = {}
    for call in sorted({s.call for s in own if s.kind == "number" and s.call >= 0}):
        numbers = {name: numbers_by_key(own, name, call) for name in weights}
        parts = [weights[name] * fmean(by_key.values()) for name, by_key in numbers.items() if by_key]
        reward = numbers_by_key(own, OWN_REWARD, call).get(member.owner) if OWN_REWARD not in weights else None
        if parts or reward is not None:
            rewards[str(call)] = sum(parts) + (reward or 0.0)
    return rewards
