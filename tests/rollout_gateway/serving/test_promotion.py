"""Decisions that several gateways make about one model."""

from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from pipeline.events import PolicyPromoted, standing_decisions
from pipeline.log.broker import Broker
from rollout_gateway.http.errors import ApiError
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.promotion import Action, Decision, Promotion, VersionDecision


class Together:
    """A log to which the first publishes of several gateways come when each of them has read the decisions."""

    def __init__(self, broker: Broker, gateways: int) -> None:
        self._broker, self._missing, self._all = broker, gateways, anyio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    async def publish(self, *args: Any, **more: Any) -> Any:
        self._missing -= 1
        if self._missing == 0:
            self._all.set()
        await self._all.wait()
        return await self._broker.publish(*args, **more)


def gateway(broker: Any) -> Promotion:
    fleet: Any = SimpleNamespace(changed=lambda: None)
    router: Any = SimpleNamespace(current=lambda _: "m@0")
    return Promotion("p", broker, Policies("p", ["m"]), fleet, router)


async def decisions(broker: Broker) -> list[PolicyPromoted]:
    return [r.event for r in await broker.read(PolicyPromoted)]


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def load(*_: Any) -> None:
        """Every version is loaded."""

    monkeypatch.setattr(Promotion, "_wait_until_loaded", load)


@pytest.mark.timeout(120)
async def test_rollbacks_at_several_gateways_at_once_take_back_one_decision_each(broker: Broker) -> None:
    """Also beside a promotion: a rollback names what stands once it is made."""
    for step in range(1, 6):
        event = PolicyPromoted(project="p", model="m", version=f"m@{step}", request=f"r{step}")
        await broker.publish(event)
    log = Together(broker, 4)
    made: list[tuple[Action, Decision]] = [("rollback", Decision())] * 3
    made.append(("promote", VersionDecision(version="m@6")))
    async with anyio.create_task_group() as tasks:
        for action, decision in made:
            tasks.start_soon(gateway(log).decide, "m", action, decision)
    events = await decisions(broker)
    assert len(events) == 9
    for number, event in enumerate(events, 1):
        assert event.version == standing_decisions(events[:number])[-1].version


async def test_a_rollback_that_is_repeated_at_another_gateway_takes_back_nothing_more(broker: Broker) -> None:
    """Also at once, and after another decision. Another decision under its id is refused."""
    with pytest.raises(ApiError, match="No decision about m is left") as refused:
        await gateway(broker).decide("m", "rollback", Decision())
    assert (refused.value.status, refused.value.code) == (409, "no_decision")
    for step in (1, 2, 3):
        event = PolicyPromoted(project="p", model="m", version=f"m@{step}", request=f"r{step}")
        await broker.publish(event)
    log = Together(broker, 2)
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(gateway(log).decide, "m", "rollback", Decision(request="back"))
    await gateway(broker).decide("m", "promote", VersionDecision(version="m@4"))
    answer = await gateway(broker).decide("m", "rollback", Decision(request="back"))
    assert answer == {"model": "m", "action": "rollback", "version": "m@0", "other": None}
    with pytest.raises(ApiError, match="Nothing was recorded") as refused:
        await gateway(broker).decide("m", "promote", VersionDecision(version="m@1", request="back"))
    assert (refused.value.status, refused.value.code) == (409, "request_exists")
    assert [e.version for e in await decisions(broker)] == ["m@1", "m@2", "m@3", "m@2", "m@4"]
