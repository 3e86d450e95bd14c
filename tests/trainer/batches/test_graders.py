"""How far feedback of one key moves a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import LossConfig, NatsConfig, TrainerConfig
from pipeline.events import Grader, GroupScored, Hint, Member
from pipeline.log.broker import Broker
from tests.trainer import kit
from tests.trainer.kit import exchange, running, steps_reach, training_group
from trainer.batches.graders import limit_graders
from trainer.batches.groups import Example, TrainingGroup, examples, units
from trainer.batches.sequences import build
from trainer.engine.engine import Engine

CONFIG = TrainerConfig(loss=LossConfig(baseline="batch", advantage_scaling="none"))


def fan(reward: float | None = None, key: str = "fan", **calls: float) -> Grader:
    return Grader(key=key, reward=reward, call_rewards=calls)


def made(group: str, *members: Member) -> TrainingGroup:
    scored = GroupScored(project="p", group=group, model="tiny", judge="j", members=members)
    sequences = []
    for member in members:
        prompt: list[int] = []
        history = []
        for call in range(member.exchanges):
            prompt = [*prompt, 5]
            history.append(exchange(member.trajectory, call, prompt, [7, 8][: 1 + len(history) % 2]))
            prompt = [*prompt, 7, 8][: len(prompt) + 1 + (len(history) - 1) % 2]
        sequences += build(member.trajectory, history)
    return training_group(scored, sequences)


def run(name: str, reward: float, *graders: Grader) -> TrainingGroup:
    return made(name, Member(trajectory=name, reward=reward, graders=graders, exchanges=1))


def step_of(made_of: Sequence[Example]) -> dict[str, np.ndarray[Any, Any]]:
    """Advantage times weight of each trained token, by run."""
    return {
        e.sequence.trajectory: e.weight
        * (
            np.full(e.sequence.trained_tokens, e.advantage)
            if e.call_advantages is None
            else e.call_advantages
        )
        for e in made_of
    }


def size(
    step: dict[str, np.ndarray[Any, Any]], groups: Sequence[TrainingGroup], config: TrainerConfig
) -> float:
    """The sum of the absolute advantages of what the loss averages over."""
    of_loss = {s.trajectory: units(s, config) for g in groups for s in g.sequences or ()}
    return sum(of_loss[name] * float(np.abs(v).mean()) for name, v in step.items())


@pytest.mark.parametrize("max_share", [0.0, 0.4])
def test_ten_thousand_thumbs_of_one_key_decide_no_more_than_its_limit(max_share: float) -> None:
    rng = np.random.default_rng(7)
    others = [run(f"run{i}", float(rng.random())) for i in range(200)]
    thumbs = [run(f"thumb{i}", 1.0, fan()) for i in range(10_000)]
    alone = step_of(examples(others, CONFIG))
    after, metrics = limit_graders([*thumbs, *others], CONFIG, max_share)
    found, silent = step_of(after), sum(2 * abs(v[0]) for v in alone.values())
    moved = sum(np.abs(v - alone.get(name, 0.0)).sum() for name, v in found.items())
    assert metrics["graders_limited"] == 1
    assert metrics["grader_share"] > 0.5
    assert moved == pytest.approx(max_share / (1 - max_share) * silent / 2, rel=1e-9)


LOSSES = st.builds(
    LossConfig,
    type=st.sampled_from(["dapo", "grpo", "cispo"]),
    baseline=st.sampled_from(["group", "task", "batch"]),
    advantage_scaling=st.sampled_from(["none", "group", "batch"]),
    advantage_balance=st.sampled_from([0.0, 0.5, -0.3]),
    advantage_normalization=st.sampled_from(["none", "mean_abs"]),
    turn_discount=st.sampled_from([1.0, 0.5]),
    weighting=st.sampled_from(["loss", "trajectory"]),
)
NUMBERS = st.floats(-1e6, 1e6, allow_subnormal=False)


@st.composite
def members(draw: st.DrawFn, name: str) -> tuple[Member, Member | None]:
    """A run, and what is left of it without the feedback of the key `fan`."""
    calls = draw(st.integers(1, 3))
    of_calls = st.dictionaries(st.sampled_from([str(n) for n in range(calls)]), NUMBERS, max_size=2)
    own = Member(trajectory=name, reward=draw(NUMBERS), call_rewards=draw(of_calls), exchanges=calls)
    match draw(st.sampled_from(["silent", "graded", "only"])):
        case "silent":
            return own, own
        case "graded":
            grader = fan(own.reward, **own.call_rewards)
            thumbed = Member(
                trajectory=name, reward=draw(NUMBERS), call_rewards=draw(of_calls), exchanges=calls, graders=(grader,)
            )  # fmt: skip
            return thumbed, own
        case _:
            return Member(trajectory=name, reward=own.reward, exchanges=calls, graders=(fan(),)), None


@settings(max_examples=100)
@given(data=st.data(), loss=LOSSES, max_share=st.floats(0.0, 0.9))
def test_whatever_a_key_says_the_step_stays_within_its_limit_of_the_step_without_it(
    data: st.DataObject, loss: LossConfig, max_share: float
) -> None:
    config = TrainerConfig(loss=loss)
    groups, without = [], []
    for g in range(data.draw(st.integers(1, 3))):
        runs = [data.draw(members(f"{g}-{i}")) for i in range(data.draw(st.integers(1, 4)))]
        groups.append(made(f"g{g}", *(said for said, _ in runs)))
        without.append(made(f"g{g}", *(left for _, left in runs if left is not None)))
    silent = step_of(examples(without, config))
    after = step_of(limit_graders(groups, config, max_share)[0])
    moved = {name: v - silent.get(name, 0.0) for name, v in after.items()}
    allowed = max_share / (1 - max_share) * size(silent, groups, config)
    largest = max((float(np.abs(v).max()) for v in [*after.values(), *silent.values()]), default=0.0)
    assert size(moved, groups, config) <= allowed * (1 + 1e-9) + 1e-9 * (largest + 1.0)


def test_a_key_that_decided_a_part_of_rewards_loses_this_part_only() -> None:
    """a has 1 by the key and 0.5 without, b has 0: 0.5 and -0.5 with the key, 0.25 and -0.25 without. What it added,
    0.25 and -0.25, is as large as the step without it."""
    groups = [run("a", 1.0, fan(0.5)), run("b", 0.0)]
    for max_share, expected in ((0.5, 0.5), (0.1, 0.25 * (1 + 1 / 9)), (0.0, 0.25)):
        after, metrics = limit_graders(groups, CONFIG, max_share)
        assert [e.advantage for e in after] == pytest.approx([expected, -expected])
        assert metrics == {"grader_share": 0.5, "graders_limited": float(max_share < 0.5)}


def test_several_keys_above_the_limit_are_measured_against_the_step_without_all_of_them() -> None:
    """Two keys with ten runs each, one with two that is within the limit, and others without feedback."""
    keys = {"x": 10, "y": 10, "z": 2}
    groups = [run(f"{key}{i}", n * (-1.0) ** i, fan(key=key)) for key, n in keys.items() for i in range(n)]
    groups += [run(f"own{i}", (-1.0) ** i) for i in range(20)]
    after, metrics = limit_graders(groups, CONFIG, 0.2)
    sizes = dict.fromkeys("xyzo", 0.0)
    for example in after:
        sizes[example.sequence.trajectory[0]] += abs(example.advantage)
    assert metrics["graders_limited"] == 2
    assert sizes["x"] == pytest.approx(0.25 * (sizes["o"] + sizes["z"]))
    assert sizes["y"] == pytest.approx(sizes["x"])


def test_a_run_that_two_limited_keys_graded_counts_for_what_each_added_alone() -> None:
    groups = [run("a", 9.0, fan(0.0, "x"), fan(0.0, "y")), run("b", 1.0), run("c", 0.0)]
    after, metrics = limit_graders(groups, CONFIG, 0.2)
    assert metrics["graders_limited"] == 2
    alone = {"b": 0.5, "c": -0.5}  # without the run
    moved = sum(abs(e.advantage - alone.get(e.sequence.trajectory, 0.0)) for e in after)
    assert moved <= 2 * 0.25 * 1.0 + 1e-12


def test_keys_that_give_all_rewards_train_nothing_below_a_limit_of_one_and_everything_at_it() -> None:
    groups = [run("a", 1.0, fan()), run("b", 0.0, fan())]
    assert [e.advantage for e in limit_graders(groups, CONFIG, 0.5)[0]] == [0.0, 0.0]
    after, metrics = limit_graders(groups, CONFIG, 1.0)
    assert ([e.advantage for e in after], metrics) == ([0.5, -0.5], {})


def test_hints_of_one_key_teach_no_more_than_its_share_of_the_trained_tokens() -> None:
    """Twenty tokens: the key's hints are about sixteen, another's about two, and the judge's about two."""
    groups = []
    for i in range(10):
        by = {0: "", 1: "desk"}.get(i, "fan")
        calls = (0, 1) if by == "fan" else (-1,)
        hints = tuple(Hint(call=call, text="No.", by=by) for call in calls)
        group = made(f"g{i}", Member(trajectory=f"r{i}", reward=float(i % 2), hints=hints, exchanges=2))
        group.hinted = {f"r{i}": {max(call, 0): np.array([9, 9], np.int32) for call in calls}}
        groups.append(group)
    tokens = sum(s.trained_tokens for g in groups for s in g.sequences or ())
    before = {e.sequence.trajectory: sum(len(x.slots) for x in e.lessons) for e in examples(groups, CONFIG)}
    for max_share in (0.0, 0.1, 0.3, 1.0):
        after, metrics = limit_graders(groups, CONFIG, max_share)
        found = {e.sequence.trajectory: sum(len(x.slots) for x in e.lessons) for e in after}
        assert found["r0"] == before["r0"]
        assert (
            sum(found[f"r{i}"] for i in range(2, 10)) <= max_share * tokens < max(1, max_share) * tokens + 1
        )
        assert (found["r1"] == before["r1"]) == (max_share > 0)
        if max_share < 1:
            assert metrics["graders_limited"] == (2 if max_share == 0 else 1)
            assert metrics["grader_share"] == sum(before[f"r{i}"] for i in range(2, 10)) / tokens
        else:
            assert (found, metrics) == (before, {})


def test_without_feedback_nothing_is_said_and_nothing_changes() -> None:
    groups = [run("a", 1.0), run("b", 0.0)]
    after, metrics = limit_graders(groups, CONFIG, 0.1)
    assert (step_of(after), metrics) == (step_of(examples(groups, CONFIG)), {})


def test_the_gradient_moves_by_the_same_factor(tiny_base: str, tmp_path: Path) -> None:
    """The loss is linear in advantages where sampler and trainer agree."""
    config = kit.settings(tiny_base, tmp_path, **{"loss.baseline": "batch", "loss.advantage_scaling": "none"})
    engine = kit.exactly(Engine(tiny_base, config.trainer))
    kit.stir(engine)
    rng = np.random.default_rng(3)

    def sampled(name: str, reward: float, *graders: Grader) -> TrainingGroup:
        ids = [int(i) for i in rng.integers(1, kit.VOCAB, 6)]
        logprobs = kit.logprobs_of(tiny_base, ids[:3], ids[3:])
        event = Member(trajectory=name, reward=reward, graders=graders, exchanges=1)
        scored = GroupScored(project="p", group=name, model="tiny", judge="j", members=(event,))
        return training_group(scored, build(name, [exchange(name, 0, ids[:3], ids[3:], logprobs=logprobs)]))

    groups = [sampled(f"thumb{i}", 1.0, fan()) for i in range(30)]
    groups += [sampled(f"run{i}", float(rng.random())) for i in range(10)]

    def gradient(max_share: float) -> np.ndarray[Any, Any]:
        for parameter in engine.model.parameters:
            parameter.grad = None
        kit.backward(engine, limit_graders(groups, config.trainer, max_share)[0], range(40), 0)
        return np.concatenate([p.grad.numpy().ravel() for p in engine.model.parameters if p.grad is not None])

    silent, limited, whole = (gradient(m) for m in (0.0, 0.2, 1.0))
    wanted = limit_graders(groups, config.trainer, 0.2)[0]
    base = limit_graders(groups, config.trainer, 0.0)[0]
    unlimited = examples(groups, config.trainer)
    factor = (wanted[0].advantage - base[0].advantage) / (unlimited[0].advantage - base[0].advantage)
    assert 0 < factor < 0.5
    assert np.linalg.norm(limited - silent - factor * (whole - silent)) <= 1e-4 * np.linalg.norm(
        whole - silent
    )


@pytest.mark.anyio
async def test_a_step_says_which_share_a_key_would_have_had(
    broker: Broker, nats_config: NatsConfig, tiny_base: str, tmp_path: Path
) -> None:
    """The alarm `feedback_share` reads this metric."""
    config = kit.settings(tiny_base, tmp_path, nats_config, groups_per_step=2)
    config = msgspec.structs.replace(config, feedback=msgspec.structs.replace(config.feedback, max_share=0.2))
    await kit.publish_group(broker, "own", [0.0, 1.0], seed=1)
    graded = kit.group("graded", [0.0, 1.0])
    fans = tuple(msgspec.structs.replace(m, graders=(fan(),)) for m in graded.members)
    await kit.publish_group(broker, "graded", [0.0, 1.0], seed=2, members=fans)
    async with running(config):
        (event,) = await steps_reach(broker, 1)
    assert event.metrics["graders_limited"] == 1
    assert event.metrics["grader_share"] == pytest.approx(0.5)
