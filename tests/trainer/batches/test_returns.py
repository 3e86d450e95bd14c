"""Rewards of calls: every advantage against its literal formula."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.chat.sampling import Defaults
from pipeline.config import Config, LossConfig, TrainerConfig
from pipeline.events import GroupScored, Hint, Member
from pipeline.log.broker import Broker
from pipeline.log.messages import Place
from tests.trainer import kit
from tests.trainer.kit import exchange, played, training_group
from trainer.batches.examples import make_examples
from trainer.batches.groups import AdmittedGroup, GroupWithHistory, Refusal
from trainer.batches.histories import Histories
from trainer.batches.returns import calls_with_credit, returns_of
from trainer.batches.tasks import EarlierRuns
from trainer.sequences import build

Runs = dict[str, tuple[float, dict[int, float], int]]
"""Name of a run to its reward, the rewards of its calls, and its number of calls."""


def made(group: str, runs: Runs, **more: Any) -> GroupWithHistory:
    """Runs whose calls continue each other in one sequence; each samples two tokens."""
    members = tuple(
        Member(trajectory=name, reward=reward, call_rewards={str(k): r for k, r in of_calls.items()}, exchanges=calls)
        for name, (reward, of_calls, calls) in runs.items()
    )
    return played(kit.group(group, [], members=members), **more)


def literal(runs: Runs, gamma: float) -> dict[str, list[float]]:
    """The returns, written down as the formula is."""
    return {
        name: [
            sum(gamma ** (j - k) * of_calls.get(j, 0.0) for j in range(k, calls)) + gamma ** (calls - 1 - k) * reward
            for k in range(calls)
        ]
        for name, (reward, of_calls, calls) in runs.items()
    }


def of_tokens(group: list[GroupWithHistory], **loss: Any) -> dict[str, list[float]]:
    """The advantage of each trained token, by run."""
    made = make_examples(group, TrainerConfig(loss=LossConfig(**loss)))
    return {
        e.sequence.trajectory: [e.advantage] * e.sequence.trained_tokens
        if e.call_advantages is None
        else e.call_advantages.tolist()
        for e in made
    }


RUNS: Runs = {"a": (0.5, {1: 1.0}, 3), "b": (-1.0, {0: 0.25, 2: -0.5}, 4), "c": (0.0, {}, 1), "d": (0.75, {0: 1.0}, 2)}
OTHERS: Runs = {"e": (0.3, {0: 0.1}, 2), "f": (0.9, {}, 2)}


EARLIER: Runs = {"x": (0.2, {1: -0.75}, 3), "y": (1.0, {}, 1)}
"""Runs of an earlier group, which the baseline `task` compares with."""


def compared(name: str, group: Runs, baseline: str) -> Runs:
    """The runs whose mean return is the baseline of a run of `group`."""
    match baseline:
        case "group":
            return group
        case "task":
            return EARLIER | {other: run for other, run in group.items() if other != name}
        case _:
            return RUNS | OTHERS


def differences(gamma: float, baseline: str) -> dict[str, list[float]]:
    """The return of each call less the mean return of its position, by run; a run that is over counts with its last
    call."""
    out = {}
    for group in (RUNS, OTHERS):
        for name, own in literal(group, gamma).items():
            others = literal(compared(name, group, baseline), gamma).values()
            out[name] = [
                value - sum(r[min(call, len(r) - 1)] for r in others) / len(others) for call, value in enumerate(own)
            ]
    return out


def batch_of(gamma: float) -> list[GroupWithHistory]:
    earlier, batch = made("earlier", EARLIER), [made("g", RUNS), made("h", OTHERS)]
    runs = EarlierRuns(gamma)
    runs.add(earlier.event, earlier.members, 1)
    for group in batch:
        group.admitted.earlier = runs.before(group.event, 2)
    return batch


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.5, 0.0])
@pytest.mark.parametrize("scaling", ["none", "group", "batch"])
@pytest.mark.parametrize("baseline", ["group", "task", "batch"])
def test_an_advantage_is_the_calls_return_less_that_of_its_position(gamma: float, scaling: str, baseline: str) -> None:
    found = of_tokens(batch_of(gamma), turn_discount=gamma, advantage_scaling=scaling, baseline=baseline)
    expected = differences(gamma, baseline)
    for group in (RUNS, OTHERS):
        spread = literal(RUNS | OTHERS if scaling == "batch" else group, gamma)
        divisor = 1.0 if scaling == "none" else np.std([g for r in spread.values() for g in r], ddof=1) + 1e-4
        for name in group:
            of_calls = np.array(expected[name]) / divisor
            np.testing.assert_allclose(found[name], np.repeat(of_calls, 2), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("loss", "weighting"), [("dapo", "loss"), ("dapo", "trajectory"), ("grpo", "loss"), ("grpo", "trajectory")]
)
@pytest.mark.parametrize("baseline", ["group", "task", "batch"])
def test_normalised_advantages_have_the_mean_size_one_as_the_loss_averages(
    loss: str, weighting: str, baseline: str
) -> None:
    found = of_tokens(
        batch_of(0.9),
        type=loss,
        turn_discount=0.9,
        baseline=baseline,
        advantage_scaling="none",
        advantage_normalization="mean_abs",
        weighting=weighting,
    )
    expected = differences(0.9, baseline)
    sizes = [[abs(a) for a in of_calls] for of_calls in expected.values()]
    if (loss, weighting) == ("dapo", "loss"):  # over tokens, of which each call has as many
        size = np.mean([a for of_run in sizes for a in of_run])
    else:
        size = np.mean([np.mean(of_run) for of_run in sizes])
    for name, of_calls in expected.items():
        np.testing.assert_allclose(found[name], np.repeat(of_calls, 2) / size, rtol=0, atol=1e-10)


def test_one_reward_a_run_gives_the_advantages_of_runs_bit_for_bit() -> None:
    rewards = [0.1, 0.7, 0.2, 1.0 / 3]
    runs: Runs = {f"r{i}": (reward, {}, 3) for i, reward in enumerate(rewards)}
    of_runs = np.array(rewards)
    expected = (of_runs - of_runs.mean()) / (of_runs.std(ddof=1) + 1e-4)
    made_of = make_examples([made("g", runs)], TrainerConfig())
    assert [e.advantage for e in made_of] == expected.tolist()
    assert all(e.call_advantages is None for e in made_of)


@st.composite
def groups_of_calls(draw: st.DrawFn) -> GroupWithHistory:
    """A group of two or three runs with rewards, rewards of calls, and agents."""
    numbers = st.sampled_from([0.0, 0.5, 1.0])
    runs: Runs = {}
    roles = {}
    for name in "abc"[: draw(st.integers(2, 3))]:
        calls = draw(st.integers(1, 3))
        runs[name] = (draw(numbers), draw(st.dictionaries(st.integers(0, calls - 1), numbers)), calls)
        roles[name] = draw(st.dictionaries(st.integers(0, calls - 1), st.sampled_from(["x", "y"])))
    return made("g", runs, roles={name: of_run for name, of_run in roles.items() if of_run})


@given(groups_of_calls(), st.sampled_from([1.0, 0.9, 0.5, 0.0]))
@example(made("g", {"a": (1.0, {}, 1), "b": (1.0, {}, 5)}), 0.9)
def test_a_group_is_refused_for_equal_returns_where_no_token_has_an_advantage(
    group: GroupWithHistory, gamma: float
) -> None:
    config = TrainerConfig(loss=LossConfig(turn_discount=gamma, advantage_scaling="none"))
    refused = group.refusal(0, config) or group.within_staleness(0, config)
    advantages = of_tokens([group], turn_discount=gamma, advantage_scaling="none")
    largest = max(abs(a) for of_run in advantages.values() for a in of_run)
    assert isinstance(refused, Refusal) == (largest <= 1e-6)
    assert not isinstance(refused, Refusal) or refused.reason == "no_variance"


def test_rewards_of_calls_that_were_not_captured_count_for_the_calls_before_them() -> None:
    member = Member(trajectory="a", reward=1.0, call_rewards={"2": 0.5, "9": 4.0, "x": 1.0})
    assert returns_of(member, 3, 0.5).tolist() == [0.375, 0.75, 1.5]


def test_a_discount_counts_the_calls_of_the_run_and_not_those_that_are_left_to_train() -> None:
    batch = made("g", {"a": (1.0, {}, 3), "b": (0.0, {}, 3)})
    (whole,) = (e for e in make_examples([batch], CONFIG_OF_CALLS) if e.sequence.trajectory == "a")
    fresh = [s for n in "ab" for s in build(n, [exchange(n, 0, [5], [7, 8])])]  # the later calls are stale
    few = training_group(batch.event, fresh)
    (left,) = (e for e in make_examples([few], CONFIG_OF_CALLS) if e.sequence.trajectory == "a")
    assert whole.call_advantages is not None
    assert (left.advantage, whole.call_advantages[0]) == (0.125, 0.125)


CONFIG_OF_CALLS = TrainerConfig(loss=LossConfig(turn_discount=0.5, advantage_scaling="none"))


async def test_calls_that_nothing_judged_are_context_in_a_run_of_which_only_calls_are_judged(broker: Broker) -> None:
    """Two of four calls are judged in a, one of three in b, whose second call has a hint. By the formula, positions 0
    and 1 are compared; b has returned what its first call gave by its second."""
    judged = (
        Member(trajectory="a", reward=0.0, graded="calls", call_rewards={"0": 1.0, "1": -1.0}, exchanges=4),
        Member(
            trajectory="b",
            reward=0.0,
            graded="calls",
            call_rewards={"0": 1.0},
            exchanges=3,
            hints=(Hint(call=1, text="No."),),
        ),
    )
    scored = GroupScored(project="p", group="g", model="tiny", judge="j", members=judged)
    for member in judged:
        for call in kit.conversation(member.trajectory, member.exchanges, group="g"):
            await broker.publish(call)
    histories = Histories(broker, TrainerConfig(), Defaults(), None, Config().may_train)
    group = await histories.read(AdmittedGroup(scored, Place(1, 0)))
    assert isinstance(group, GroupWithHistory)
    assert [s.trained_tokens for s in group.sequences] == [4, 4]
    assert group.history.unjudged_tokens == 4 + 2
    found = of_tokens([group], advantage_scaling="none")
    assert found == {"a": [-0.5, -0.5, -0.5, -0.5], "b": [0.5, 0.5, 0.5, 0.5]}
    run = msgspec.structs.replace(judged[0], graded="run")
    assert [calls_with_credit(m, 3, 1.0).tolist() for m in (*judged, run)] == [[True, True, False]] * 2 + [[True] * 3]


def test_a_hint_is_credited_to_its_own_call_only() -> None:
    hinted = Member(
        trajectory="a",
        reward=0.0,
        graded="calls",
        call_rewards={"1": 1.0},
        exchanges=5,
        hints=(Hint(call=3, text="No."),),
    )
    assert calls_with_credit(hinted, 5, 1.0).tolist() == [True, True, False, True, False]
    assert calls_with_credit(hinted, 5, 0.0).tolist() == [False, True, False, True, False]
    only_hint = msgspec.structs.replace(hinted, call_rewards={})
    assert calls_with_credit(only_hint, 5, 1.0).tolist() == [False, False, False, True, False]


def test_a_call_that_no_reward_reaches_has_no_advantage_though_a_teacher_teaches_it() -> None:
    """With a teacher from outside all tokens train. Without a discount from call to call, only rewarded calls do."""
    batch = made("g", {"a": (0.0, {0: 1.0, 1: -1.0}, 4), "b": (0.0, {1: 1.0}, 4)})
    members = tuple(msgspec.structs.replace(m, graded="calls") for m in batch.event.members)
    batch = training_group(msgspec.structs.replace(batch.event, members=members), batch.sequences)
    found = of_tokens([batch], advantage_scaling="none")
    assert found == {"a": [-0.5, -0.5, -1.0, -1.0, 0, 0, 0, 0], "b": [0.5, 0.5, 1.0, 1.0, 0, 0, 0, 0]}
    found = of_tokens([batch], advantage_scaling="none", turn_discount=0.0)
    assert found == {"a": [0.5, 0.5, -1.0, -1.0, 0, 0, 0, 0], "b": [0, 0, 1.0, 1.0, 0, 0, 0, 0]}
    assert calls_with_credit(members[1], 3, 0.0).tolist() == [False, True, False]
    assert calls_with_credit(members[0], 3, 0.5, {0: "x"}).tolist() == [True, True, False]
    assert calls_with_credit(members[1], 3, 0.5, {0: "x"}).tolist() == [False, True, False]


def test_groups_are_compared_by_their_own_agents_or_not_at_all() -> None:
    """Regression: beside a group with rewards of calls, runs without any were compared with those whose first call had
    the same agent."""
    plain = made("g", {"a": (1.0, {}, 2), "b": (0.0, {}, 2)}, roles={"a": {0: "x"}, "b": {0: "y"}})
    alone = of_tokens([plain], advantage_scaling="none")
    beside = of_tokens([plain, made("h", OTHERS)], advantage_scaling="none")
    assert {name: beside[name] for name in "ab"} == alone == {"a": [0.5] * 4, "b": [-0.5] * 4}


ROLES = {"a": {0: "x", 2: "x", 3: "y"}, "b": {0: "x", 1: "x"}, "c": {}, "d": {0: "y", 1: "x"}}


@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("baseline", ["group", "batch"])
def test_an_agents_calls_are_credited_with_its_own_rewards_and_the_runs(gamma: float, baseline: str) -> None:
    """The return over the later calls of the same agent, less the mean at the same place of that agent."""
    runs: Runs = {
        "a": (0.5, {0: 1.0, 1: -2.0, 3: 0.25}, 4),
        "b": (-1.0, {1: 0.5}, 3),
        "c": (0.0, {}, 2),
        "d": (0.75, {0: 1.0}, 2),
    }
    literal_of: dict[str, dict[tuple[str, int], float]] = {}
    place_of: dict[str, list[tuple[str, int]]] = {}
    for name, (reward, of_calls, calls) in runs.items():
        literal_of[name], place_of[name] = {}, []
        for k in range(calls):
            own = [j for j in range(calls) if ROLES[name].get(j, "") == ROLES[name].get(k, "")]
            later = [j for j in own if j >= k]
            value = sum(gamma ** later.index(j) * of_calls.get(j, 0.0) for j in later)
            place = (ROLES[name].get(k, ""), own.index(k))
            literal_of[name][place] = value + gamma ** (len(later) - 1) * reward
            place_of[name].append(place)
    halves = [["a", "b", "c", "d"]] if baseline == "batch" else [["a", "b"], ["c", "d"]]
    batch = []
    for group, names in (("g", ["a", "b"]), ("h", ["c", "d"])):
        roles = {name: ROLES[name] for name in names if ROLES[name]}
        batch.append(made(group, {name: runs[name] for name in names}, roles=roles))
    found = of_tokens(batch, turn_discount=gamma, baseline=baseline, advantage_scaling="none")
    for name, places_of_run in place_of.items():
        (compared,) = (half for half in halves if name in half)
        expected = []
        for role, place in places_of_run:
            others = [[v for (r, _), v in literal_of[other].items() if r == role] for other in compared]
            numbers = [o[min(place, len(o) - 1)] for o in others if o]
            expected += [literal_of[name][role, place] - sum(numbers) / len(numbers)] * 2
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-10)
