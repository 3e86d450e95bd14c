"""A message that ends the service that handles it: it becomes a dead letter, and the others are handled."""

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import anyio
import pytest

from pipeline import streams
from pipeline.commands import dead_letters
from pipeline.config import NatsConfig
from pipeline.errors import BrokerUnavailableError
from pipeline.events import DeadLettered
from pipeline.log.broker import Broker
from pipeline.log.consumer import Delivery, handling, is_own_fault
from pipeline.log.deaths import Deaths
from tests.kits.events import completed
from tests.kits.quick_service import quick_consumers
from tests.pipeline.log import deaths_child


@pytest.fixture
async def broker(nats_config: NatsConfig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Broker]:
    """A connection to a log that delivers again soon what a dead process held."""
    monkeypatch.setattr(streams, "CONSUMERS", quick_consumers(deaths_child.ACK_WAIT_S))
    async with Broker.connect(nats_config) as broker:
        yield broker


async def test_a_message_that_ends_the_service_again_and_again_is_a_dead_letter(
    nats_config: NatsConfig, broker: Broker, subtests: pytest.Subtests
) -> None:
    # The cause of a first exit is not known. That of an exception is.
    for how, deaths in (("exit", 3), ("exception", 2)):
        with subtests.test(how):
            for i in range(9):
                await broker.publish(completed(deaths_child.POISON if i == 4 else f"{how}-{i}"))
            command = [sys.executable, "-m", deaths_child.__name__, nats_config.url, how]
            codes = []
            while len(codes) < 6 and 0 not in codes:
                child = await anyio.run_process(command, check=False, stderr=subprocess.DEVNULL)
                codes.append(child.returncode)
            assert codes == [3 if how == "exit" else 1] * deaths + [0]
            (letter,) = await broker.read(DeadLettered)
            assert (letter.event.reason, letter.event.consumer) == ("ended_service", "judge")
            assert "judge ended 2 times" in letter.event.detail
            assert await broker.lag("judge") == 0
            await dead_letters.drop(broker, letter)
            await broker.js.purge_stream("ROLLOUTS")


async def test_a_message_is_handled_alone_when_it_is_delivered_again(broker: Broker) -> None:
    """A stop in order and a lost log are no deaths: the messages come again, and none is counted."""
    for name in "abc":
        await broker.publish(completed(name))
    for error in (None, BrokerUnavailableError("the log is away")):
        async with broker.consume("judge") as messages:
            assert await messages.batch(10, wait_s=60)
            await messages.close(error)
    async with broker.consume("judge") as messages:
        seen: set[str] = set()
        # On a slow machine new ones, or a copy of what was acknowledged late, come between.
        while len(seen) < 6:
            batch = await messages.batch(10)
            old = [d for d in batch if not d.event.trajectory.startswith("new-")]
            assert not old or batch == old[:1]
            for delivery in old:
                await broker.publish(completed(f"new-{delivery.event.trajectory}"))
                if delivery.event.trajectory != "b":  # that one is held: the next ones come all the same
                    await delivery.ack(confirmed=True)
            seen |= {d.event.trajectory for d in batch}
        assert seen == {name + old for old in "abc" for name in ("", "new-")}
    assert await broker.read(DeadLettered) == []


async def test_an_exception_that_was_caught_blames_nothing_that_is_settled_and_nothing_twice(broker: Broker) -> None:
    for name in "abcd":
        await broker.publish(completed(name))
    async with broker.consume("judge") as messages:
        deliveries: list[Delivery] = []
        while len(deliveries) < 4:
            deliveries += await messages.batch(10)
        acked, given_back, acked_first, held = deliveries
        await acked_first.ack(confirmed=True)
        with suppress(ValueError), handling(deliveries), handling([held]):
            raise ValueError
        await acked.ack(confirmed=True)
        await given_back.give_back(600)
        await messages.close(ValueError("a failure of something else"))
        deaths = Deaths(broker, messages.spec)
        counts = [await deaths.count(d.stream, d.place) for d in deliveries]
        assert counts == [0, 0, 0, 1]


async def test_a_consumer_without_a_limit_of_deaths_counts_none(broker: Broker) -> None:
    spec = streams.ConsumerSpec("uncounted", "ROLLOUTS", ("rollout.completed.>",), "a test", max_deaths=0)
    await broker.publish(completed("a"))
    async with broker.consume(spec) as messages:
        (delivery,) = await messages.batch(1, wait_s=60)
        with suppress(ValueError), handling([delivery]):
            raise ValueError
        await messages.close(ValueError("bug"))
        assert await Deaths(broker, spec).count(delivery.stream, delivery.place) == 0


@pytest.mark.parametrize("silent", [False, True])
async def test_deliveries_go_back_also_if_the_log_takes_no_deaths(broker: Broker, silent: bool) -> None:
    async def count(*_: Any) -> int:
        if silent:
            await anyio.sleep_forever()
        raise BrokerUnavailableError("the bucket is away")

    spec = streams.ConsumerSpec("slow", "ROLLOUTS", ("rollout.completed.>",), "a test", ack_wait_s=600)
    await broker.publish(completed("a"))

    async def fail() -> None:
        async with broker.consume(spec) as messages:
            messages._deaths.count = count  # type: ignore[method-assign]
            (delivery,) = await messages.batch(1, wait_s=60)
            with handling([delivery]):
                raise ValueError

    with pytest.raises(ExceptionGroup) as failed:
        await fail()
    assert failed.group_contains(ValueError)
    async with broker.consume(spec) as messages:
        (again,) = await messages.batch(1, wait_s=60)
        assert again.deliveries == 2


def test_which_failures_are_counted() -> None:
    lost, bug = BrokerUnavailableError("away"), ValueError("bug")
    assert not is_own_fault(ExceptionGroup("", [lost]))
    assert is_own_fault(ExceptionGroup("", [lost, ExceptionGroup("", [bug])]))
    assert not is_own_fault(KeyboardInterrupt())
