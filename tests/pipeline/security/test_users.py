"""Every NATS user against a real server: what is forbidden is refused, and what its service does works."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from pipeline import streams
from pipeline.commands import dead_letters
from pipeline.config import ConfigError, NatsConfig
from pipeline.events import DeadLettered
from pipeline.log import key_value, memory
from pipeline.log.broker import Broker, BrokerUnavailableError
from pipeline.log.credentials import make_client, options
from pipeline.security import users
from tests.kits.events import checkpoint, completed

API = "$JS.API."
CHECKPOINT = "policy.checkpoint.default.m.9"
MAY = {
    CHECKPOINT: "trainer operator",
    f"{CHECKPOINT}.branch": "experiment operator",
    "policy.retired.default.m": "trainer experiment operator",
    "policy.loaded.default.m": "sampler operator",
    "policy.unloaded.default.m": "sampler operator",
    "policy.promoted.default.m": "gateway operator",
    "policy.alarm.default.over_judge_budget": "store operator",
    "rollout.opened.default.t": "gateway operator",
    "rollout.exchange.default.t": "gateway operator",
    "rollout.completed.default.m.g.t": "gateway operator",
    "group.scored.default.m.g.j.1": "judge operator",
    "dead.POLICY.store-policy": "store operator",
    "alive.GROUPS": "operator",
    "alive.POLICY": "operator",
    "timer.due.rollout.timeout.p.m.g": "",
    "$KV.FLEET.sampler.default.r": "sampler",
    "$KV.FLEET.gateway.default.g": "gateway",
    "$O.ADAPTERS.C.x": "trainer experiment",
    "$O.CLAIMS_ROLLOUTS.C.x": "gateway judge operator",
    "_INBOX_judge.x": "",
    "_INBOX_gateway.x": "",
    "$SYS.REQ.SERVER.PING": "",
    f"{API}INFO": "",
    f"{API}STREAM.CREATE.MINE": "operator",
    f"{API}STREAM.UPDATE.ROLLOUTS": "operator",
    f"{API}STREAM.UPDATE.POLICY": "operator",
    **{f"{API}STREAM.DELETE.{stream}": "" for stream in (*users.EVENT_STREAMS, "OBJ_ADAPTERS")},
    **{f"{API}STREAM.PURGE.{stream}": "" for stream in (*users.EVENT_STREAMS, "KV_FLEET")},
    f"{API}STREAM.PURGE.ROLLOUTS": "memory",
    f"{API}STREAM.PURGE.GROUPS": "memory",
    f"{API}STREAM.PURGE.OBJ_ADAPTERS": "trainer experiment",
    f"{API}STREAM.MSG.DELETE.ROLLOUTS": "erase",
    f"{API}STREAM.MSG.DELETE.GROUPS": "erase",
    f"{API}STREAM.MSG.DELETE.POLICY": "trainer erase",
    f"{API}STREAM.MSG.DELETE.DEAD": "erase operator",
    f"{API}STREAM.MSG.DELETE.TIMERS": "",
    f"{API}STREAM.MSG.DELETE.OBJ_ADAPTERS": "",
    f"{API}DIRECT.GET.ROLLOUTS": "gateway judge trainer experiment store telemetry erase operator memory",
    f"{API}DIRECT.GET.OBJ_ADAPTERS": "sampler trainer experiment store operator",
    f"{API}CONSUMER.CREATE.ROLLOUTS.mine": "gateway operator",
    f"{API}CONSUMER.CREATE.POLICY.store-policy": "store operator",
    f"{API}CONSUMER.DURABLE.CREATE.ROLLOUTS.mine": "operator",
    f"{API}CONSUMER.DURABLE.CREATE.GROUPS.mine": "experiment operator",
    f"{API}CONSUMER.DURABLE.CREATE.GROUPS.trainer": "operator",
    f"{API}CONSUMER.DELETE.ROLLOUTS.judge": "",
    f"{API}CONSUMER.DELETE.POLICY.store-policy": "",
    f"{API}CONSUMER.MSG.NEXT.ROLLOUTS.judge": "judge",
    f"{API}CONSUMER.MSG.NEXT.ROLLOUTS.store-rollouts": "store",
    f"{API}CONSUMER.MSG.NEXT.GROUPS.trainer": "trainer",
    f"{API}CONSUMER.MSG.NEXT.POLICY.store-policy": "store",
    "$JS.ACK.ROLLOUTS.judge.1.2.3.4.5": "judge",
    "$JS.ACK.ROLLOUTS.store-rollouts.1.2.3.4.5": "store",
    "$JS.ACK.GROUPS.trainer.1.2.3.4.5": "trainer",
}
"""Subjects, and the users who may publish to each. All others have to be refused."""
UNHEARD = ("rollout.exchange.>", "policy.>", "$JS.API.>", "$JS.ACK.>", "$JS.EVENT.>", "$O.>", "_INBOX.>", ">")
"""What no user may subscribe to; nor to the inboxes of another."""


@pytest.fixture
def guarded(start_nats: Callable[..., Any], tmp_path: Path) -> NatsConfig:
    """A server with the users of the table, whose seeds lie in `nats.users`."""
    keys = tmp_path / "keys"
    server = start_nats(extra=users.authorization(keys))
    return NatsConfig(url=server.url, users=str(keys), provision=False, publish_deadline_s=20)


@asynccontextmanager
async def connected(config: NatsConfig, name: str) -> AsyncIterator[tuple[Any, list[str]]]:
    """A bare connection of a user, and what the server objected to."""
    objections: list[str] = []

    async def on_error(error: Exception) -> None:
        objections.append(str(error))

    client = make_client(config)
    await client.connect(config.url, error_cb=on_error, **options(config, name))
    try:
        yield client, objections
    finally:
        await client.close()


async def test_every_forbidden_action_is_refused(guarded: NatsConfig) -> None:
    assert {name for names in MAY.values() for name in names.split()} == {u.name for u in users.USERS}
    taken, tried = [], 0
    async with Broker.connect(msgspec.structs.replace(guarded, provision=True), name="supervisor"):
        pass
    for who in users.USERS:
        others = [f"_INBOX_{u.name}.>" for u in users.USERS if u is not who]
        forbidden = [subject for subject, names in MAY.items() if who.name not in names.split()]
        wanted = {f'publish to "{s}"'.lower(): s for s in forbidden}
        wanted |= {f'subscription to "{s}"'.lower(): s for s in (*UNHEARD, *others)}
        tried += len(wanted)
        async with connected(guarded, who.name) as (client, objections):
            for subject in forbidden:
                await client.publish(subject, b"x")
            for subject in (*UNHEARD, *others):
                await client.subscribe(subject)
            with anyio.move_on_after(60):  # the client tells of an objection when it comes to it
                while len(objections) < len(wanted):
                    await client.flush()
            said = " ".join(objections).lower()
        taken += [f"{who.name}: {text}" for text in wanted if text not in said]
    assert not taken
    assert tried >= 600


async def test_a_missing_right_is_an_error_in_the_log(guarded: NatsConfig, caplog: pytest.LogCaptureFixture) -> None:
    async with Broker.connect(guarded, name="judge") as broker:
        await broker.client.publish(CHECKPOINT, b"x")
        with anyio.fail_after(60):
            while not (said := [r for r in caplog.records if "lacks a right" in r.getMessage()]):
                await broker.client.flush()
    assert CHECKPOINT in str(said[0].__dict__["fields"])


async def test_a_service_that_may_not_create_streams_says_which_setting_it_needs(guarded: NatsConfig) -> None:
    settings = msgspec.structs.replace(guarded, provision=True, connect_timeout_s=5.0)
    with pytest.raises(BrokerUnavailableError, match=r"needs nats\.provision = false"):
        async with Broker.connect(settings, name="gateway"):
            pass


async def test_who_has_no_key_gets_no_connection(guarded: NatsConfig) -> None:
    stranger = NatsConfig(url=guarded.url)
    with pytest.raises(BrokerUnavailableError, match=r"does not take this connection.*nats\.nkey_seed"):
        async with Broker.connect(stranger):
            pass


async def test_a_branch_s_trainer_and_the_bound_of_memory_can_do_their_work(guarded: NatsConfig) -> None:
    """The others' work is done by the services of `tests/test_up.py` and of the crash matrix, in whose logs no right is
    missed."""
    async with Broker.connect(msgspec.structs.replace(guarded, provision=True), name="supervisor") as operator:
        await operator.publish(completed("t"))
        spec = streams.trainer_consumer("trial")
        async with Broker.connect(guarded, name="experiment") as trial, trial.consume(spec) as taking:
            assert await taking.batch(1, wait_s=0.2) == []
            await key_value.put(trial, streams.FLEET.name, "experiment.p.trial", b"{}", 60)
            await trial.put_object(streams.ADAPTERS_BUCKET, "adapter", b"tar")
            await trial.publish(checkpoint(branch="trial"))
        async with Broker.connect(guarded, name="memory") as bounding:
            await bounding.js.purge_stream("ROLLOUTS", seq=1)
            await memory.trim(bounding, 1)


def test_a_name_that_no_user_has_is_refused_with_the_names_there_are() -> None:
    assert users.user("status").name == "operator"
    with pytest.raises(ConfigError, match=r"'gatway' is no user of the log: .* erase, experiment, gateway, "):
        users.user("gatway")


@pytest.mark.parametrize("name", [name for user in users.USERS for name in user.connections])
def test_each_further_name_of_a_connection_is_used(name: str) -> None:
    """A command that was taken out would leave its way in."""
    root = Path(users.__file__).parents[2]
    services = ("pipeline", "rollout_gateway", "judge", "trainer", "store")
    files = (path for service in services for path in (root / service).rglob("*.py"))
    assert any(f'name="{name}"' in path.read_text() for path in files)


async def test_a_message_that_no_one_can_use_is_buried_retried_and_dropped(guarded: NatsConfig) -> None:
    supervising = msgspec.structs.replace(guarded, provision=True)
    async with Broker.connect(supervising, name="supervisor") as operator:
        async with Broker.connect(guarded, name="gateway") as gateway:
            await gateway.js.publish("rollout.completed.p.m.bad", b"\xc1garbage")
        for act in (dead_letters.retry, dead_letters.drop):
            async with Broker.connect(guarded, name="judge") as judge, judge.consume("judge") as messages:
                assert await messages.batch(10, wait_s=60) == []
            (letter,) = await operator.read(DeadLettered)
            await act(operator, letter)
        assert await operator.read(DeadLettered) == []
