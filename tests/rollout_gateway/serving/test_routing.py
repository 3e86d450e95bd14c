"""Which version a name resolves to."""

import pytest

from pipeline.events import PolicyPromoted, TrajectoryOpened
from rollout_gateway.http.errors import ApiError
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.replicas import Fleet
from rollout_gateway.serving.routing import VersionRouter
from tests.rollout_gateway.conftest import PROJECT


def promoted(version: str, other: str = "") -> PolicyPromoted:
    return PolicyPromoted(
        project=PROJECT, model="tictactoe", version=version, action="promote", other=other, percent=50.0
    )


@pytest.mark.parametrize("other", ["", "tictactoe@2"])
async def test_a_promoted_version_that_is_refused_gets_a_409(other: str) -> None:
    """The fault that was: only exact and pinned versions were checked, so a call waited until it got a 503."""
    policies = Policies(PROJECT, ["tictactoe"])
    router = VersionRouter(policies, Fleet())
    assert policies.models["tictactoe"].decide(promoted("tictactoe@1", other), 1)
    versions, again = ([router.resolve("tictactoe", opening(f"t{i}")) for i in range(32)] for _ in range(2))
    assert versions == again, "each run keeps its version"
    assert set(versions) == {"tictactoe@1", other or "tictactoe@1"}
    for version in versions:
        policies.refused[version] = "the adapter changes nothing"
    with pytest.raises(
        ApiError, match="not served because its adapter failed a check: the adapter changes nothing"
    ) as refused:
        router.resolve("tictactoe", opening("t0"))
    assert (refused.value.status, refused.value.code) == (409, "version_refused")


async def test_a_pin_wins_over_the_version_that_the_call_names() -> None:
    router = VersionRouter(Policies(PROJECT, ["tictactoe"]), Fleet())
    assert router.resolve("tictactoe@0", opening("t", pinned="tictactoe@7")) == "tictactoe@7"


async def test_a_base_is_a_name_of_its_models_base_version() -> None:
    router = VersionRouter(Policies(PROJECT, ["tictactoe"]), Fleet(), {"tictactoe": "Qwen/Qwen3-4B"})
    assert router.name("Qwen/Qwen3-4B") == "tictactoe"
    assert router.resolve("Qwen/Qwen3-4B", opening("t")) == "tictactoe@0"
    router = VersionRouter(Policies(PROJECT, ["tictactoe"]), Fleet(), {"tictactoe": "tictactoe"})
    assert router.name("tictactoe") == "tictactoe"
    assert router.resolve("tictactoe@0", None) == "tictactoe@0"


@pytest.mark.parametrize("pin", ["chess@0", "chess@9", "tictactoe", "elsewhere@1"])
async def test_a_recorded_pin_that_is_no_version_of_the_trajectorys_model_is_refused(pin: str) -> None:
    router = VersionRouter(Policies(PROJECT, ["tictactoe", "chess"]), Fleet())
    with pytest.raises(ApiError) as refused:
        router.resolve("tictactoe", opening("t", pinned=pin))
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")


def opening(trajectory: str, pinned: str = "") -> TrajectoryOpened:
    return TrajectoryOpened(project=PROJECT, trajectory=trajectory, model="tictactoe", group="g", pinned=pinned)
