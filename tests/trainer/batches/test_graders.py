"""The share of a step that the feedback of one key has."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import LossConfig, TrainerConfig
from pipeline.events import Hint, Member
from pipeline.log.broker import Broker
from tests.trainer import kit
from tests.trainer.kit import played, running, steps_reach
from trainer.batches.examples import Example, loss_terms, make_examples
from trainer.batches.graders import cap_graders
from trainer.batches.groups import GroupWithHistory

CONFIG = TrainerConfig(loss=LossConfig(baseline="batch", advantage_scaling="none"))


def made(group: str, *members: Member, **more: Any) -> GroupWithHistory:
    return played(kit.group(group, [], members=members), **more)


def run(name: str, reward: float, *graders: str) -> GroupWithHistory:
    return made(name, Member(trajectory=name, reward=reward, graded_by=graders, exchanges=1))


def step_of(made_of: Sequence[Example]) -> dict[str, np.ndarray[Any, Any]]:
    """Advantage times weight of each trained token, by run."""
    return {
        e.sequence.trajectory: e.weight
        * (np.full(e.sequence.trained_tokens, e.advantage) if e.call_advantages is None else e.call_advantages)
        for e in made_of
    }


def size(made_of: Sequence[Example], config: TrainerConfig) -> float:
    """The sum of the absolute advantages of what the loss averages over."""
    of_loss = {e.sequence.trajectory: loss_terms(e.sequence, config) for e in made_of}
    return sum(of_loss[name] * float(np.abs(v).mean()) for name, v in step_of(made_of).items())


LOSSES = st.builds(
    LossConfig,
    type=st.sampled_from(["dapo", "grpo", "cispo"]),
    baseline=st.sampled_from(["group", "task", "batch"]),
    advantage_scaling=st.sampled_from(["none", "group", "batch"]),
    advantage_normalization=st.sampled_from(["none", "mean_abs"]),
    turn_discount=st.sampled_from([1.0, 0.5]),
    weighting=st.sampled_from(["loss", "trajectory"]),
)
NUMBERS = st.floats(-1e6, 1e6, allow_subnormal=False)


@st.composite
def members(draw: st.DrawFn, name: str, key: str) -> Member:
    calls = draw(st.integers(1, 3))
    of_calls = st.dictionaries(st.sampled_from([str(n) for n in range(calls)]), NUMBERS, max_size=2)
    graders = (key,) if key and draw(st.booleans()) else ()
    return Member(
        trajectory=name, reward=draw(NUMBERS), call_rewards=draw(of_calls), exchanges=calls, graded_by=graders
    )


@settings(max_examples=100)
@given(data=st.data(), loss=LOSSES, max_share=st.floats(0.0, 0.9))
def test_whatever_keys_say_each_has_its_share_at_most_and_other_groups_train_as_without_it(
    data: st.DataObject, loss: LossConfig, max_share: float
) -> None:
    config = TrainerConfig(loss=loss)
    groups = []
    for g in range(data.draw(st.integers(1, 5))):
        key = data.draw(st.sampled_from(["", "x", "y", "z"]))
        runs = [data.draw(members(f"{g}-{i}", key)) for i in range(data.draw(st.integers(1, 4)))]
        groups.append(made(f"g{g}", *runs))
    after, _ = cap_graders(groups, config, max_share)
    assert [e.sequence for e in after] == [s for g in groups for s in g.sequences]
    graders_of = {g: {key for m in g.event.members for key in m.graded_by} for g in groups}
    for key in "xyz":
        own = {s.trajectory for g in groups if key in graders_of[g] for s in g.sequences}
        part = size([e for e in after if e.sequence.trajectory in own], config)
        assert part <= max_share * size(after, config) * (1 + 1e-6) + 1e-9
    silent = [g for g in groups if not graders_of[g]]
    for example in make_examples(silent, config):
        (now,) = [e for e in after if e.sequence is example.sequence]
        assert now.advantage == example.advantage
        assert np.array_equal(now.call_advantages, example.call_advantages)  # type: ignore[arg-type]


def test_several_keys_above_the_limit_have_the_same_size_and_one_below_keeps_its_own() -> None:
    keys = {"x": 10, "y": 10, "z": 2}
    groups = [run(f"{key}{i}", n * (-1.0) ** i, key) for key, n in keys.items() for i in range(n)]
    groups += [run(f"own{i}", (-1.0) ** i) for i in range(20)]
    after, metrics = cap_graders(groups, CONFIG, 0.2)
    sizes = dict.fromkeys("xyzo", 0.0)
    for example in after:
        sizes[example.sequence.trajectory[0]] += abs(example.advantage)
    assert metrics["graders_limited"] == 2
    assert sizes == pytest.approx({"x": 8.0, "y": 8.0, "z": 4.0, "o": 20.0})


def test_each_key_of_a_group_has_an_equal_part_of_it_which_is_scaled_by_itself() -> None:
    """x has 1.5 of 2, which becomes 0.5 of 1: a third of its half of the first group, and of the second."""
    config = TrainerConfig(loss=LossConfig(baseline="group", advantage_scaling="none"))
    groups = []
    for graders in (("x", "y"), ("x",)):
        runs = [Member(trajectory=f"{graders}{n}", reward=n, exchanges=1) for n in (0.0, 1.0)]
        groups.append(made(str(graders), runs[0], msgspec.structs.replace(runs[1], graded_by=graders)))
    after, metrics = cap_graders(groups, config, 0.5)
    assert [e.advantage for e in after] == pytest.approx([-1 / 3, 1 / 3, -1 / 6, 1 / 6])
    assert metrics == {"grader_share": 0.75, "graders_limited": 1.0}


def test_hints_of_one_key_teach_no_more_than_its_share_of_the_trained_tokens() -> None:
    """Of forty tokens the key's hints are about 32, another's about two, and the judge's about two."""
    groups = []
    for i in range(10):
        by = {0: "", 1: "desk"}.get(i, "fan")
        calls = (0, 1) if by == "fan" else (-1,)
        hints = tuple(Hint(call=call, text="No.", by=by) for call in calls)
        member = Member(trajectory=f"r{i}", reward=float(i % 2), hints=hints, exchanges=2)
        prompts = {f"r{i}": {max(call, 0): np.array([9, 9], np.int32) for call in calls}}
        groups.append(made(f"g{i}", member, teacher_prompts=prompts))
    tokens = sum(s.trained_tokens for g in groups for s in g.sequences)
    before = {e.sequence.trajectory: sum(len(x.slots) for x in e.hinted_calls) for e in make_examples(groups, CONFIG)}
    for max_share in (0.0, 0.1, 0.3, 1.0):
        after, metrics = cap_graders(groups, CONFIG, max_share)
        found = {e.sequence.trajectory: sum(len(x.slots) for x in e.hinted_calls) for e in after}
        assert found["r0"] == before["r0"]
        assert sum(found[f"r{i}"] for i in range(2, 10)) <= max_share * tokens < max(1, max_share) * tokens + 1
        assert (found["r1"] == before["r1"]) == (max_share > 0)
        if max_share < 1:
            assert metrics["graders_limited"] == (2 if max_share == 0 else 1)
            assert metrics["grader_share"] == sum(before[f"r{i}"] for i in range(2, 10)) / tokens
        else:
            assert (found, metrics) == (before, {})


async def test_a_step_says_which_share_a_key_would_have_had(settings: kit.Settings, broker: Broker) -> None:
    config = settings(groups_per_step=2)
    config = msgspec.structs.replace(config, feedback=msgspec.structs.replace(config.feedback, max_share=0.2))
    await kit.publish_group(broker, "own", [0.0, 1.0], seed=1)
    graded = kit.group("graded", [0.0, 1.0])
    fans = tuple(msgspec.structs.replace(m, graded_by=("fan",)) for m in graded.members)
    await kit.publish_group(broker, "graded", [0.0, 1.0], seed=2, members=fans)
    async with running(config):
        (event,) = await steps_reach(broker, 1)
    assert event.metrics["graders_limited"] == 1
    assert event.metrics["grader_share"] == pytest.approx(0.5)
