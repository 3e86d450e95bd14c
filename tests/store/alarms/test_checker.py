"""The check of the alarms in a running store: one event when an alarm begins, one when it ends."""

from pathlib import Path

import anyio

from pipeline.config import AlarmsConfig, Config, NatsConfig
from pipeline.events import AlarmChanged
from pipeline.log.broker import Broker
from store.alarms.checker import Checker
from store.lake.lake import open_lake
from store.reading import sql
from tests.store.alarms.kit import changes, letters, steps
from tests.store.kit import StoreProcess, publish

OFTEN = AlarmsConfig(every_s=0.1, steps=2)


def met(alarm: str, about: str = "") -> AlarmChanged:
    """A condition that a query found."""
    return AlarmChanged(project="p", alarm=alarm, state="raised", model="m", about=about, value=3.0, detail="far")


KL = met("kl_rise")


async def started(broker: Broker, folder: Path) -> Checker:
    """A checker that has read the log."""
    checker = Checker(Config(run_dir=str(folder)), broker, {})
    await checker._read_changes()
    return checker


async def states(broker: Broker) -> list[str]:
    return [event.state for event in await changes(broker)]


async def test_an_alarm_is_one_event_when_it_begins_and_one_when_it_ends(
    nats_config: NatsConfig, running_store: StoreProcess, tmp_path: Path
) -> None:
    async with Broker.connect(nats_config) as broker, running_store(OFTEN) as config:
        await publish(broker, steps("kl", [0.0, 18.0]))
        (began,) = await changes(broker, 1)
        assert (began.alarm, began.state, began.model, began.value) == ("kl_rise", "raised", "m", 9.0)
        await publish(broker, steps("kl", [0.0, 18.0, 0.1, 0.1])[2:])
        began_too, ended = await changes(broker, 2)
        assert began_too == began
        assert (ended.alarm, ended.state, ended.since) == ("kl_rise", "cleared", began.since)
    with sql.connect(config) as connection:
        rows = connection.sql("SELECT alarm, since = cleared_at, since < cleared_at FROM alarms").fetchall()
        assert rows == [("kl_rise", False, True)]


async def test_a_log_near_its_limit_is_an_alarm(broker: Broker, running_store: StoreProcess) -> None:
    await broker.provision()
    config = (await broker.stream_info("DEAD")).config
    await publish(broker, letters(20))
    held = (await broker.stream_info("DEAD")).state.bytes
    config.max_bytes = held + held // 8
    await broker.js.update_stream(config)
    async with running_store(OFTEN):
        found = {e.alarm: e for e in await changes(broker, 2)}
    assert found["log_full"].about == "DEAD"
    assert 0.8 < found["log_full"].value < 0.9


async def test_what_could_not_be_checked_neither_begins_nor_ends(broker: Broker, tmp_path: Path) -> None:
    checker = await started(broker, tmp_path)
    await checker._apply([KL], set())
    for _ in range(3):
        await checker._apply([], {"kl_rise"})
    assert await states(broker) == ["raised"]
    await checker._apply([], set())
    await checker._apply([KL], set())
    await checker._apply([], set())
    assert await states(broker) == ["raised"], "one check without it is not its end"
    await checker._apply([], set())
    assert await states(broker) == ["raised", "cleared"]


async def test_a_server_that_is_still_starting_is_not_behind(broker: Broker, tmp_path: Path) -> None:
    """A run that goes on on other ports, or a server that restarts: it has no record, and its newest version is old."""
    both = [met("replica_behind", about="127.0.0.1:9"), KL]
    checker = await started(broker, tmp_path)
    await checker._apply(both, set())
    assert [e.alarm for e in await changes(broker)] == ["kl_rise"]
    checker._starting["127.0.0.1:9"] -= checker._config.vllm.start_timeout_s
    await checker._apply(both, set())
    assert [e.alarm for e in await changes(broker)] == ["kl_rise", "replica_behind"]
    restarted = await started(broker, tmp_path)
    for _ in range(3):
        await restarted._apply(both, set())
    assert await states(broker) == ["raised"] * 2, "a restart ends no alarm of a server that is still behind"
    for _ in range(2):
        await restarted._apply([KL], set())
    assert await states(broker) == ["raised", "raised", "cleared"]


async def test_a_damaged_file_is_an_alarm_and_the_others_are_checked(
    broker: Broker, running_store: StoreProcess
) -> None:
    """Regression: no alarm was checked any more, and none told why."""
    async with running_store(OFTEN) as config:
        await publish(broker, letters(1))
        await changes(broker, 1)
    lake = open_lake(config)
    await publish(broker, steps("kl", [0.0, 18.0]))
    Path(lake.storage.key("policy.alarm", lake.names("policy.alarm")[0])).write_bytes(b"PAR1")
    async with running_store(OFTEN):
        found = await changes(broker, 3)
    assert {e.alarm for e in found} == {"dead_letters", "file_damaged", "kl_rise"}


async def test_two_stores_raise_and_end_an_alarm_once(broker: Broker, tmp_path: Path) -> None:
    """Both look at the same moment, each with a run directory of its own."""
    checkers = [Checker(Config(run_dir=str(tmp_path / name)), broker, {}) for name in "ab"]

    async def at_once(present: list[AlarmChanged]) -> list[str]:
        for checker in checkers:
            await checker._read_changes()
        async with anyio.create_task_group() as tg:
            for checker in checkers:
                tg.start_soon(checker._apply, present, set())
        return await states(broker)

    for _ in range(3):
        assert await at_once([KL]) == ["raised"]
    for _ in range(4):
        changed = await at_once([])
    assert changed == ["raised", "cleared"]
    assert await at_once([KL]) == ["raised", "cleared", "raised"]
