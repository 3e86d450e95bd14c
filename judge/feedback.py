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
    """What is known about one run besides its own reward: from signals, reward functions, or a judge of what happened
    next."""

    call_rewards: Mapping[str, float] = field(default_factory=dict)
    """As in `Member`."""
    hints: tuple[Hint, ...] = ()
    graded_by: tuple[str, ...] = ()
    """As in `Member`."""


def merge_feedback(parts: Iterable[RunFeedback]) -> RunFeedback:
    """Return in one what several parts of a reward say about one run: for each call the sum of its rewards, and the
    hints of all parts in this order."""
    feedbacks = list(parts)
    hints = tuple(hint for feedback in feedbacks for hint in feedback.hints)
    return RunFeedback(_sum_by_call(feedback.call_rewards for feedback in feedbacks), hints)


def _sum_by_call(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of each call's rewards. Rewards are given, and returned, by the number of the call."""
    total: dict[str, float] = defaultdict(float)
    for part in parts:
        for call, reward in part.items():
            total[call] += reward
    return dict(total)


def numbers_by_key(signals: Iterable[SignalGiven], name: str, call: int = -1) -> dict[str, float]:
    """Return the last number that each API key gave under `name` about a call (-1: about the run), by the key's name.
    `signals`: those of one run, in the order of the log."""
    matching = [s for s in signals if (s.kind, s.name, s.call) == ("number", name, call)]
    return {s.by: s.value for s in matching if is_usable(s.value)}


def feedback_value(signals: Iterable[SignalGiven], reward: RewardConfig) -> float | None:
    """Return the value of a reward of kind `feedback` for a run with these signals: the mean over the keys that gave a
    number, else `reward.default`, which may be `None`."""
    numbers = numbers_by_key(signals, reward.name)
    return fmean(numbers.values()) if numbers else reward.default


def counted_signals(signals: Iterable[SignalGiven], config: JudgeConfig) -> list[SignalGiven]:
    """Return `signals` without the numbers of keys that are not among the `by` of the reward of their name: otherwise
    any key that may give feedback could decide a reward before the key that knows the result."""
    permitted_keys = {r.name: r.by for r in config.rewards if r.kind == "feedback" and r.by}
    return [s for s in signals if s.kind != "number" or s.by in permitted_keys.get(s.name, (s.by,))]


def signals_by_run(signals: Iterable[SignalGiven]) -> dict[str, list[SignalGiven]]:
    """Return the signals of each run, by trajectory, in the order given."""
    signals_of: dict[str, list[SignalGiven]] = defaultdict(list)
    for signal in signals:
        signals_of[signal.trajectory].append(signal)
    return signals_of


def feedback_on(
    members: Sequence[TrajectoryCompleted],
    signals: Sequence[SignalGiven],
    config: JudgeConfig,
    of_rewards: Mapping[str, RunFeedback],
) -> dict[str, RunFeedback]:
    """Return the feedback on each of `members`, by trajectory: what `signals` say of it, added to `of_rewards`, the
    feedback of reward functions and of the judge of what happened next."""
    signals_of, feedback = signals_by_run(signals), dict(of_rewards)
    for member in members:
        if not (of_run := signals_of.get(member.trajectory)):
            continue
        earlier = of_rewards.get(member.trajectory, RunFeedback())
        hints = (hint_of(s) for s in of_run if s.kind in ("text", "correction") and s.text)
        calls = _sum_by_call((earlier.call_rewards, _call_rewards(member, of_run, config)))
        feedback[member.trajectory] = RunFeedback(calls, (*earlier.hints, *hints), _graders(of_run, config))
    return feedback


def hint_of(signal: SignalGiven) -> Hint:
    """Return a signal of kind `text` or `correction` as a hint."""
    return Hint(
        call=signal.call,
        text=signal.text,
        kind="correction" if signal.kind == "correction" else "text",
        by=signal.by,
        version=signal.version,
    )


def _graders(signals: Iterable[SignalGiven], config: JudgeConfig) -> tuple[str, ...]:
    """Return the names of the API keys that gave a number which is part of a reward of kind `feedback`, sorted."""
    names = {r.name for r in config.rewards if r.kind == "feedback"}
    graders = {s.by for s in signals if s.kind == "number" and s.name in names and is_usable(s.value)}
    return tuple(sorted(graders))


def _call_rewards(member: TrajectoryCompleted, signals: Sequence[SignalGiven], config: JudgeConfig) -> dict[str, float]:
    """Return the rewards that the signals of the run `member` give to its calls, by the calls' numbers; the rule is in
    this module's docstring."""
    weights = {r.name: r.weight for r in config.rewards if r.kind == "feedback"}
    rewards: dict[str, float] = {}
    for call in sorted({s.call for s in signals if s.kind == "number" and s.call >= 0}):
        numbers = {name: numbers_by_key(signals, name, call) for name in weights}
        parts = [weights[name] * fmean(by_key.values()) for name, by_key in numbers.items() if by_key]
        by_owner = numbers_by_key(signals, OWN_REWARD, call).get(member.owner) if OWN_REWARD not in weights else None
        if parts or by_owner is not None:
            rewards[str(call)] = sum(parts) + (by_owner or 0.0)
    return rewards
