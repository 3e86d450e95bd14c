"""Rewards of several parts, and functions that misbehave."""

from typing import Any

import pytest

from journeywork.trajectory import finite_number
from judge.labelled import GroupFile, GroupMember
from judge.rewards.compose import ConfiguredComposer, open_composer
from judge.rewards.sandbox import RewardFunction, RewardFunctionError
from judge.scoring import AGENT, agent_reward
from pipeline.config import Config, ConfigError, JudgeConfig, RewardConfig, load
from tests.judge.functions import NUMBERS
from tests.judge.kit import Model, completed, loading, ruler, transcript
from tests.kits.scoring_server import Scorer

HERE = "tests.judge.functions"


def function(name: str, **settings: Any) -> RewardConfig:
    return RewardConfig(name=name, kind="python", entry=f"{HERE}:{name}", **settings)


@pytest.mark.parametrize(
    ("name", "why"),
    [("raises", "ValueError in line [0-9]+ of functions.py"), ("dies", "ended its process"), ("eats", "MemoryError")],
)
async def test_a_function_that_misbehaves_fails_that_call_only(name: str, why: str) -> None:
    async with RewardFunction(function(name, timeout_s=60.0)).open() as call:
        with pytest.raises(RewardFunctionError, match=why):
            await call({"id": "bad"})
        if name == "dies":
            assert (await call({"id": "good"})).reward == 0.5


async def test_functions_may_return_the_numbers_that_the_sdk_takes_as_rewards() -> None:
    async with RewardFunction(function("number")).open() as call:
        for name, value in NUMBERS.items():
            try:
                reward: float | None = finite_number("reward", value)
            except (TypeError, ValueError):
                reward = None
            try:
                returned: float | None = (await call({"id": name})).reward
            except RewardFunctionError:
                returned = None
            assert returned == reward, name


async def test_a_function_rewards_calls_by_what_followed_them() -> None:
    roles = (("assistant", "b"), ("tool", "0.25"), ("assistant", "d"))
    messages = [{"role": role, "content": content} for role, content in roles]
    task = [{"role": "user", "content": "a"}]
    group = GroupFile([GroupMember("x", messages), GroupMember("y", messages[:1])], messages=task)
    config = Config(judge=JudgeConfig(rewards=(function("followed", weight=2.0),), combine="sum"))
    async with open_composer(config, loading(group.transcripts().values())) as composer:
        assert composer is not None
        rewards = await composer([completed("x"), completed("y")])
    assert rewards.final == {"x": 1.0, "y": 1.0}
    assert {name: run.call_rewards for name, run in rewards.feedback.items()} == {"x": {"0": 0.5}, "y": {}}


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ('{"calls": {"7": 1.0}}', "gave rewards to 1 calls that are none"),
        ('{"calls": {"0": "good"}}', "a str for a call, not a number"),
        ('{"calls": {"0": 1e16}}', "a number for a call that is not from -1e15"),
        ('{"calls": [1.0]}', "returned a dict other than"),
        ('{"call": {"0": 1.0}}', "returned a dict other than"),
        ('{"reward": null, "calls": {"0": 1.0}}', "a NoneType, not a number"),
    ],
)
async def test_a_function_that_rewards_calls_wrongly_gives_no_reward(
    returned: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr("judge.rewards.compose.logger.error", lambda reason, **_: logged.append(reason))

    messages = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    said = GroupFile([GroupMember("x", messages)]).transcripts().values()
    config = Config(judge=JudgeConfig(rewards=(function("followed"),)))
    async with open_composer(config, loading(said)) as composer:
        assert composer is not None
        rewards = await composer([completed("x", task=returned)])
    assert rewards.final == {}
    assert why in logged[0]


async def test_a_number_that_is_too_large_is_no_reward() -> None:
    """A reply of 400 digits that a function returns as an integer, and metrics whose sum is infinite."""
    async with RewardFunction(function("huge")).open() as call:
        for digits in (400, 5000):
            with pytest.raises(RewardFunctionError):
                await call({"id": "a", "messages": [{"content": "9" * digits}]})
        assert (await call({"id": "a", "messages": [{"content": "9" * 15}]})).reward == 10.0**15 - 1

    for combination in ("sum", "mean", "product"):
        parts = tuple(RewardConfig(name=name, kind="metric") for name in ("x", "y"))
        composer = ConfiguredComposer(JudgeConfig(rewards=parts, combine=combination), {}, {}, loading(()))
        for large in (1e308, 1e14):
            members = [completed("a", metrics={"x": large, "y": large}), completed("b", metrics={"x": 1, "y": 1})]
            rewards = await composer(members)
            assert ("a" in rewards.final) == (large < 1e15 and combination != "product")
            assert "b" in rewards.final
            assert ("1 of 2" in rewards.missing) == ("a" not in rewards.final)
    assert agent_reward(completed("a", rewards={"x": 1e308, "y": 1e308})) is None


async def test_a_function_does_not_see_the_keys_in_the_judge_s_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    async with RewardFunction(function("environment")).open() as call:
        assert (await call({"id": "a"})).reward == 0.0


MEMBERS = [
    completed("a", reward=1.0, rewards={"style": 0.5}, metrics={"speed": 0.2}),
    completed("b", reward=0.0, rewards={"style": 0.1}, metrics={"speed": 0.8}),
    completed("c", reward=0.5, metrics={}),
]
SAID = (transcript("a", "I win quality=0.9"), transcript("b", "I lose quality=0.2"), transcript("c", "quality=0.4"))


async def compose(*rewards: RewardConfig, **settings: Any) -> Any:
    config = JudgeConfig(model="x", rewards=rewards, **settings)
    rulers = {r.name: ruler(Model(Scorer()), SAID) for r in rewards if r.kind == "ruler"}
    functions = {r.name: RewardFunction(r) for r in rewards if r.kind == "python"}
    try:
        return await ConfiguredComposer(config, rulers, functions, loading(SAID))(MEMBERS)
    finally:
        for opened in functions.values():
            await opened._stop()


async def test_rewards_are_combined_by_weight_and_every_component_is_recorded() -> None:
    scores = await compose(
        RewardConfig(name="outcome", kind="agent", weight=2.0),
        RewardConfig(name="quality", kind="ruler", weight=1.0),
        function("won", weight=-1.0),
    )
    components = {"style": 0.5, "agent": 1.0, "outcome": 1.0, "quality": pytest.approx(0.9), "won": 1.0}
    assert scores.components["a"] == components
    assert scores.final == pytest.approx({"a": (2 + 0.9 - 1) / 4, "b": 0.2 / 4, "c": (1 + 0.4) / 4})
    assert {v.judge_model for v in scores.verdicts} == {"agent", "test-judge", f"python:{HERE}:won"}


async def test_a_member_without_one_of_the_components_has_no_reward() -> None:
    scores = await compose(RewardConfig(name="speed", kind="metric"), RewardConfig(name="style", kind="agent"))
    assert set(scores.final) == {"a", "b"}
    assert scores.missing == "reward speed is missing for 1 of 3"
    assert scores.components["c"] == {"agent": 0.5, "style": 0.5}


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ('{name="x"},{name="x"}', "two rewards have the same name"),
        ('{name="x", kind="python"}', "needs an entry"),
        ('{name="x", kind="ruler"}', "needs judge.model"),
        ('{name="x", kind="next_state"}', "needs judge.model"),
        ('{name="x", kind="length", free=5, limit=5}', "needs a `limit` larger than its `free`"),
        ('{name="x", kind="length", limit=5}', "set judge.combine to mean or sum"),
    ],
)
def test_settings_that_can_t_work_are_refused(rewards: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load(None, [f"judge.rewards=[{rewards}]", "judge.combine=min"])


@pytest.mark.parametrize(
    ("entry", "why"), [("nomod:fn", "No module named 'nomod'"), (f"{HERE}:missing", "AttributeError")]
)
async def test_a_function_that_can_t_be_imported_stops_the_judge_s_start(entry: str, why: str) -> None:
    reward = RewardConfig(name="x", kind="python", entry=entry)
    with pytest.raises(ConfigError, match=f"judge.rewards: x: {entry} cannot be imported: .*{why}"):
        async with open_composer(Config(judge=JudgeConfig(rewards=(reward,))), None):  # type: ignore[arg-type]
            pass


async def test_penalties_for_length_turns_and_context_are_named_parts_of_the_reward() -> None:
    config = JudgeConfig(
        combine="sum",
        rewards=(
            RewardConfig(name="solved"),
            RewardConfig(name="brief", kind="length", free=100, limit=300, weight=0.5),
            RewardConfig(name="few", kind="turns", limit=10),
            RewardConfig(name="narrow", kind="context", free=1000, limit=2000),
        ),
    )
    members = [
        completed("short", reward=1.0, sampled_tokens=100, prompt_tokens=1000),
        completed("long", reward=1.0, sampled_tokens=200, calls=5, prompt_tokens=1250),
        completed("endless", reward=1.0, sampled_tokens=9999, calls=99, prompt_tokens=9999),
    ]
    async with open_composer(Config(judge=config), loading({})) as composer:
        assert composer is not None
        scored = await composer(members)
    assert scored.final == {"short": 1.0, "long": 1.0 - 0.5 * 0.5 - 0.5 - 0.25, "endless": 1.0 - 0.5 - 1 - 1}
    assert scored.components["long"] == {AGENT: 1.0, "solved": 1.0, "brief": -0.5, "few": -0.5, "narrow": -0.25}
    assert {v.judge_model for v in scored.verdicts} == {AGENT, "penalty:length", "penalty:turns", "penalty:context"}
