"""Dead letters: listed, shown, given back to the one consumer that failed, dropped."""

from __future__ import annotations

import json

import anyio
import pytest

from pipeline import dead
from pipeline.broker import Broker
from pipeline.config import NatsConfig
from pipeline.events import DeadLettered, TrajectoryCompleted, encode
from tests.pipeline.test_broker import completed

pytestmark = pytest.mark.anyio


async def bury_one(broker: Broker, payload: bytes) -> None:
    """A letter that the judge gave up, as a fault that is gone now would leave it."""
    await broker.publish(
        DeadLettered(
            project="", stream="ROLLOUTS", stream_seq=1, original_subject="rollout.completed.p.m.t1",
            consumer="judge", reason="undecodable", detail="why", payload=payload, headers={"traceparent": "tp"},
        )
    )  # fmt: skip


async def test_a_retry_reaches_the_consumer_that_failed_and_no_other(nats_config: NatsConfig) -> None:
    async with Broker.connect(nats_config) as broker:
        await bury_one(broker, encode(completed()))
        (letter,) = await dead.find(broker, [1])
        await dead.retry(broker, letter)
        assert await dead.letters(broker) == []
        async with broker.consume("judge") as judge, broker.consume("telemetry-rollouts") as other:
            (delivery,) = await judge.batch(10)
            assert isinstance(delivery.event, TrajectoryCompleted)
            assert delivery.headers["traceparent"] == "tp"
            await delivery.ack(confirmed=True)
            assert await other.batch(10, wait_s=0.5) == []
            assert await judge.batch(10, wait_s=0.3) == []
        with anyio.fail_after(5):
            while await broker.lag("telemetry-rollouts"):
                await anyio.sleep(0.02)


async def test_a_retry_that_is_repeated_is_one_delivery(nats_config: NatsConfig) -> None:
    async with Broker.connect(nats_config) as broker:
        await bury_one(broker, encode(completed()))
        (letter,) = await dead.letters(broker)
        # A death between publishing and taking off the list: the command is given again.
        await broker.publish_raw("rollout.completed.p.m.t1.retry-1", b"x", {}, message_id="other")
        await dead.retry(broker, letter)
        assert len((await broker.js.stream_info("ROLLOUTS")).config.subjects or []) == 1
        assert (await broker.js.stream_info("ROLLOUTS")).state.messages == 1


async def test_what_fails_again_is_a_new_letter(nats_config: NatsConfig) -> None:
    async with Broker.connect(nats_config) as broker:
        await broker.js.publish("rollout.opened.p.x", b"the one that failed")
        await bury_one(broker, b"\xc1")
        await dead.retry(broker, (await dead.letters(broker))[0])
        async with broker.consume("judge") as judge:
            assert await judge.batch(10) == []
        (letter,) = await dead.letters(broker)
        assert letter.seq == 2
        await dead.drop(broker, letter)
        assert await dead.letters(broker) == []


def test_the_command(nats_config: NatsConfig, capfd: pytest.CaptureFixture[str]) -> None:
    async def fill() -> None:
        async with Broker.connect(nats_config) as broker:
            await bury_one(broker, b"\xc1 not an event")

    anyio.run(fill)
    where = ["--nats-url", nats_config.url]
    assert dead.main(["list", "--json", *where]) == 0
    (row,) = json.loads(capfd.readouterr().out)
    assert (row["seq"], row["consumer"], row["reason"]) == (1, "judge", "undecodable")
    assert dead.main(["show", "1", *where]) == 0
    assert "not an event" in json.loads(capfd.readouterr().out)["payload"]
    assert dead.main(["drop", *where]) == 1
    assert "--all" in capfd.readouterr().err
    assert dead.main(["drop", "--all", *where]) == 0
    assert dead.main(["show", "1", *where]) == 1
    assert "no dead letter 1" in capfd.readouterr().err


def test_without_a_run_the_command_says_what_it_needs(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("nothing"))
    assert dead.main(["list"]) == 2
    assert "--run-dir" in capfd.readouterr().err
