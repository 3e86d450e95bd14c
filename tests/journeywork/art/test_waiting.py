"""How `train` learns what became of its groups, at a gateway that answers what a test wants."""

from collections.abc import Awaitable, Callable
from typing import Any, cast

import anyio
import pytest

import journeywork.art as art
from journeywork.art.gateway import Gateway
from journeywork.art.training import await_step
from journeywork.art.types import TrainResult
from journeywork.transport import GatewayUnavailableError, JourneyworkError


class Scripted:
    """A gateway whose answers change with every pause of the client. The first request raises `breaks`."""

    url = "http://gateway"

    def __init__(self, *moments: dict[str, Any], breaks: Exception | None = None) -> None:
        self._now, *self._moments = moments
        self._breaks = breaks

    async def pause(self, _: float) -> None:
        if not self._moments:
            raise AssertionError("train still waits")
        self._now = self._moments.pop(0)

    async def group(self, group: str, model: str = "") -> dict[str, Any]:
        if self._breaks is not None:
            breaks, self._breaks = self._breaks, None
            raise breaks
        return {"status": "waiting", **self._now.get(group, {})}

    async def policy(self, model: str) -> dict[str, Any]:
        step = self._now.get("served", 0)
        version = f"m@{step}"
        known = {"loaded": [version], "refused": {}, "decision": None}
        return {**known, "version": version, "step": step, **self._now.get("policy", {})}


Served = Callable[..., Awaitable[TrainResult]]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """What `train` waits for, at a gateway that passes through the given moments."""

    async def wait(*moments: dict[str, Any], breaks: Exception | None = None) -> TrainResult:
        gateway = Scripted(*moments, breaks=breaks)
        monkeypatch.setattr(anyio, "sleep", gateway.pause)
        return await await_step(cast(Gateway, gateway), "m", ["a", "b"])

    return wait


TRAINED = {"status": "trained", "version": "m@1", "metrics": {"loss/train": 0.5}}
BOTH = {"a": TRAINED, "b": TRAINED}
EQUAL = {"status": "discarded", "reason": "no_variance", "detail": "all 2 rewards are 1"}


async def test_it_waits_until_the_version_is_served(served: Served) -> None:
    result = await served({}, {"a": TRAINED}, BOTH, {**BOTH, "served": 1})
    assert (result.step, result.version) == (1, "m@1")
    assert result.metrics == {"loss/train": 0.5}


async def test_a_name_that_is_pinned_elsewhere_does_not_hold_it_up(served: Served) -> None:
    pinned = {"decision": {"version": "m@0"}}
    loaded = {**pinned, "loaded": ["m@0", "m@1"]}
    assert (await served({**BOTH, "policy": pinned}, {**BOTH, "policy": loaded})).step == 1


async def test_a_version_that_one_of_several_servers_has_loaded_is_waited_for(served: Served) -> None:
    some = {**BOTH, "policy": {"loaded": ["m@0", "m@1"], "decision": {"version": ""}}}
    with pytest.raises(AssertionError, match="train still waits"):
        await served(some, some, some)


async def test_discarded_groups_are_done_with(served: Served) -> None:
    result = await served({"a": EQUAL}, {"a": EQUAL, "b": {**TRAINED}, "served": 1})
    assert (result.step, result.version) == (1, "m@1")
    nothing = await served({"a": EQUAL, "b": EQUAL})
    assert (nothing.step, nothing.version) == (0, None)


async def test_a_version_that_is_refused_is_an_error(served: Served) -> None:
    refused = {**BOTH, "policy": {"refused": {"m@1": "changes nothing"}}}
    with pytest.raises(art.TrainingError, match=r"m@1 was trained and can't be served: changes nothing"):
        await served(refused)


async def test_groups_that_cannot_be_trained_are_an_error(served: Served) -> None:
    dead = {"status": "dead", "reason": "sampler_mismatch", "detail": "0.2 nats"}
    with pytest.raises(art.TrainingError, match=r"sampler_mismatch: 0\.2 nats"):
        await served({"a": dead})


async def test_a_gateway_that_was_away_is_asked_again(served: Served) -> None:
    assert (await served({}, {**BOTH, "served": 1}, breaks=GatewayUnavailableError("gone"))).step == 1


async def test_a_key_that_was_revoked_ends_the_wait(served: Served) -> None:
    with pytest.raises(art.TrainingError, match="whether the groups were trained is not known: no such key"):
        await served({}, breaks=JourneyworkError("no such key", status=401))


async def test_groups_that_nobody_decides_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("journeywork.art.training._STEP_S", 0.1)
    monkeypatch.setattr("journeywork.art.training._POLL_S", 0.01)
    with pytest.raises(art.TrainingError, match="2 groups were neither trained nor discarded"):
        await await_step(cast(Gateway, Scripted({})), "m", ("a", "b"))
