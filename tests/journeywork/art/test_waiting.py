"""How `train` learns what became of its groups, at a gateway that answers what a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest

import journeywork.art as art
from journeywork.art.gateway import Gateway
from journeywork.art.training import StepResult, await_step

pytestmark = pytest.mark.anyio


class Scripted:
    """A gateway whose answers change with every event that it sends."""

    url = "http://gateway"

    def __init__(self, *moments: dict[str, Any], breaks: Exception | None = None) -> None:
        self._moments, self._now, self._breaks = list(moments), dict[str, Any](), breaks

    async def watch(self) -> AsyncIterator[dict[str, Any]]:
        while self._moments:
            self._now = self._moments.pop(0)
            yield {}
            if self._breaks:
                raise self._breaks
        raise AssertionError("train still waits")

    async def group(self, group: str, model: str = "") -> dict[str, Any]:
        return {"status": "waiting", **self._now.get(group, {})}

    async def policy(self, model: str) -> dict[str, Any]:
        step = self._now.get("served", 0)
        version = f"m@{step}"
        known = {"loaded": [version], "refused": {}}
        return {**known, "version": version, "step": step, **self._now.get("policy", {})}


async def served(*moments: dict[str, Any], breaks: Exception | None = None) -> StepResult:
    return await await_step(cast(Gateway, Scripted(*moments, breaks=breaks)), "m", ["a", "b"])


TRAINED = {"status": "trained", "version": "m@1", "metrics": {"loss/train": 0.5}}
EQUAL = {"status": "discarded", "reason": "no_variance", "detail": "all 2 rewards are 1"}


async def test_it_waits_until_the_version_is_served() -> None:
    both = {"a": TRAINED, "b": TRAINED}
    result = await served({}, {"a": TRAINED}, both, {**both, "served": 1})
    assert (result.step, result.version, result.trained) == (1, "m@1", True)
    assert result.metrics == {"loss/train": 0.5}


async def test_a_later_version_will_do() -> None:
    assert (await served({"a": TRAINED, "b": TRAINED, "served": 3})).step == 1


async def test_a_name_that_is_pinned_elsewhere_does_not_hold_it_up() -> None:
    pinned = {"a": TRAINED, "b": TRAINED, "policy": {"loaded": ["m@0", "m@1"]}}
    assert (await served(pinned, pinned)).step == 1


async def test_discarded_groups_are_done_with() -> None:
    result = await served({"a": EQUAL}, {"a": EQUAL, "b": {**TRAINED}, "served": 1})
    assert (result.step, result.trained) == (1, True)
    nothing = await served({"a": EQUAL, "b": EQUAL})
    assert (nothing.step, nothing.trained) == (0, False)


async def test_a_version_that_is_refused_is_an_error() -> None:
    refused = {"a": TRAINED, "b": TRAINED, "policy": {"refused": {"m@1": "changes nothing"}}}
    with pytest.raises(art.TrainingError, match=r"m@1 was trained and can't be served: changes nothing"):
        await served(refused)


async def test_groups_that_cannot_be_trained_are_an_error() -> None:
    dead = {"status": "dead", "reason": "sampler_mismatch", "detail": "0.2 nats"}
    with pytest.raises(art.TrainingError, match=r"sampler_mismatch: 0\.2 nats"):
        await served({"a": dead})


async def test_a_connection_that_breaks_is_made_again() -> None:
    both = {"a": TRAINED, "b": TRAINED}
    assert (await served({}, {**both, "served": 1}, breaks=httpx.ReadError("gone"))).step == 1


async def test_a_key_that_was_revoked_ends_the_wait() -> None:
    request = httpx.Request("GET", "http://gateway/v1/policies/events")
    refused = httpx.HTTPStatusError(
        "401 for url", request=request, response=httpx.Response(401, request=request)
    )
    with pytest.raises(art.TrainingError, match="whether the groups were trained is not known: 401"):
        await served({}, breaks=refused)


async def test_the_long_wait_for_a_group_is_that_of_its_request_alone() -> None:
    """The fault that was: completing one group set the timeout of every later request of the client."""
    waits: list[tuple[str, float]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        waits.append((request.method, request.extensions["timeout"]["read"]))
        return httpx.Response(200, json={})

    async with Gateway("http://gateway") as gateway:
        gateway._http = httpx.AsyncClient(
            base_url=gateway.url, timeout=60, transport=httpx.MockTransport(answer)
        )
        await gateway.complete_group("g", "m", [])
        await gateway.group("g", "m")
    assert waits == [("POST", 600.0), ("GET", 60.0)]
