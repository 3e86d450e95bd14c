"""Several inference servers behind one gateway: choice, exclusion, and the checks before a server gets calls."""

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import anyio
import msgspec
import pytest
from anyio.abc import TaskGroup

from pipeline.config import NatsConfig
from pipeline.events import PolicyLoaded
from pipeline.log.broker import Broker
from rollout_gateway.serving.fleet_records import SamplerRecord
from rollout_gateway.serving.membership import Membership
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.replicas import Fleet, Replica, replica_of
from rollout_gateway.serving.routing import VersionRouter
from tests.rollout_gateway.conftest import publish_adapter
from tests.rollout_gateway.fake_vllm import FakeVllm
from tests.rollout_gateway.gateway_parts import fleet_config, parts


async def test_a_server_that_left_is_forgotten_once_its_calls_ended() -> None:
    """In a cluster servers come and go under new addresses for weeks."""
    fleet = Fleet()
    idle, busy = fleet.add("http://one:1"), fleet.add("http://two:1")
    busy.in_flight["m@1"] = 1
    fleet.remove(idle)
    fleet.remove(busy)
    assert fleet.add("http://two:1") is busy
    assert fleet.add("http://one:1") is not idle
    await fleet.disconnect()


async def test_a_trajectory_stays_and_load_is_shared(nats_config: NatsConfig, tmp_path: Path) -> None:
    one, two = FakeVllm(), FakeVllm()
    async with parts(nats_config, tmp_path, [one, two]) as gateway:
        await gateway.open("t")
        for _ in range(4):
            await gateway.call("t")
        assert sorted((len(one.calls), len(two.calls))) == [0, 4]
        one.held = two.held = asyncio.Event()
        async with anyio.create_task_group() as tg:
            for _ in range(10):
                tg.start_soon(gateway.call)
            before = 4 if one.calls else 0  # the calls of the trajectory
            for server, calls in ((one, 5 + before), (two, 9 - before)):
                await server.called(calls)
            assert {r.load for r in gateway.fleet.replicas} == {5}
            one.held.set()


@pytest.mark.parametrize(("share", "served"), [(0.5, "tictactoe@1"), (1.0, "tictactoe@0")])
async def test_a_slow_replica_holds_back_a_version_only_if_all_must_have_it(
    nats_config: NatsConfig, tmp_path: Path, share: float, served: str
) -> None:
    one, slow = FakeVllm(), FakeVllm()
    settings = {"replicas.serving_share": share}
    async with parts(nats_config, tmp_path, [one, slow], **settings) as gateway:
        slow.loading = asyncio.Event()
        await publish_adapter(gateway.broker, 1)
        fast = next(r for r in gateway.fleet.replicas if r.name in one.url)
        await gateway.until(lambda: fast.holds("tictactoe@1"))
        for number in range(8):
            await gateway.open(f"t{number}")
            assert (await gateway.call(f"t{number}"))[1]["model"] == served
        assert "tictactoe@1" not in slow.calls
        slow.loading.set()
        await gateway.until(lambda: all(r.holds("tictactoe@1") for r in gateway.fleet.replicas))
        for number in range(8):
            assert (await gateway.call(f"t{number}"))[1]["model"] == "tictactoe@1"
        assert slow.calls.count("tictactoe@1") + one.calls.count("tictactoe@1") >= 8
        proofs = Counter(r.event.replica for r in await gateway.broker.read(PolicyLoaded))
        assert proofs == {r.name: 1 for r in gateway.fleet.replicas}


async def test_a_dead_replica_is_left_out_and_comes_back_proved(nats_config: NatsConfig, tmp_path: Path) -> None:
    one, two = FakeVllm(), FakeVllm()
    async with parts(nats_config, tmp_path, [one, two]) as gateway:
        await publish_adapter(gateway.broker, 1)
        await gateway.until(lambda: all(r.holds("tictactoe@1") for r in gateway.fleet.replicas))
        await one.stop()
        for _ in range(6):
            status, answer = await gateway.call()
            assert (status, answer["model"]) == (200, "tictactoe@1")
        await gateway.until(lambda: len(gateway.fleet.ready_replicas()) == 1)
        await one.start()
        await gateway.until(lambda: len(gateway.fleet.ready_replicas()) == 2)
        assert set(one.loaded) == {"tictactoe@1"}


async def test_a_broken_connection_is_tried_again_and_a_real_error_is_passed_on(
    nats_config: NatsConfig, tmp_path: Path
) -> None:
    one = FakeVllm()
    async with parts(nats_config, tmp_path, [one]) as gateway:
        one.drop_next = True
        assert (await gateway.call())[0] == 200
        one.fail_with = 500
        status, answer = await gateway.call()
        assert (status, answer["error"]["message"]) == (500, "broken")
        assert one.calls.count("tictactoe@0") == 3
        one.fail_with = 0
        await publish_adapter(gateway.broker, 1)
        await gateway.until(lambda: gateway.fleet.available("tictactoe@1"))
        one.loaded.clear()  # evicted in silence
        assert (await gateway.call())[1]["model"] == "tictactoe@1"
        assert set(one.loaded) == {"tictactoe@1"}


async def test_conversations_are_shared_and_move_only_with_their_replica() -> None:
    replicas = [Replica(f"http://127.0.0.1:{port}") for port in (1, 2, 3)]
    conversations = [f"t-{n}" for n in range(4000)]
    before = {c: replica_of(c, replicas).name for c in conversations}
    # More than four standard deviations of a share of a third.
    share = Counter(before.values())
    assert all(abs(share[r.name] - 4000 / 3) < 130 for r in replicas)
    after = {c: replica_of(c, replicas[1:]).name for c in conversations}
    assert all(after[c] == name for c, name in before.items() if name != replicas[0].name)
    assert {replica_of(c, list(reversed(replicas))).name == before[c] for c in conversations} == {True}


async def test_a_server_with_another_url_under_the_same_name_is_checked(tmp_path: Path) -> None:
    """A server's name, and so its record's key, leaves out the scheme."""
    config = fleet_config(NatsConfig(), tmp_path)
    policies, fleet = Policies(config.project, ["tictactoe"]), Fleet()
    members = Membership(config, cast("Broker", None), policies, fleet, VersionRouter(policies, fleet), "gw")
    checked: list[tuple[Replica, anyio.CancelScope]] = []

    def apply(url: str) -> None:
        record = SamplerRecord(url=url, models=("tictactoe",), server_start="1")
        members._apply_record("key", msgspec.json.encode(record) if url else b"", cast("TaskGroup", tasks))

    tasks = SimpleNamespace(start_soon=lambda _, replica, scope: checked.append((replica, scope)))
    for url in ("http://a:1", "http://a:1", "https://a:1"):
        apply(url)
    assert [replica.upstream.url for replica, _ in checked] == ["http://a:1", "https://a:1"]
    assert [scope.cancel_called for _, scope in checked] == [True, False]
    assert fleet.replicas == [checked[1][0]]
    apply("")
    assert checked[1][1].cancel_called
    assert not fleet.replicas
