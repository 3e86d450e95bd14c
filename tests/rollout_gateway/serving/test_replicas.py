"""Several inference servers behind one gateway: choice, exclusion, and the checks before a server gets calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import anyio
import pytest

from pipeline.config import NatsConfig
from pipeline.events import PolicyLoaded
from rollout_gateway.http.errors import ApiError
from tests.rollout_gateway.conftest import publish_adapter
from tests.rollout_gateway.fake_vllm import FakeVllm, parts

pytestmark = pytest.mark.anyio


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
            with anyio.fail_after(10):
                while len(one.calls) + len(two.calls) < 14:
                    await anyio.sleep(0.01)  # until the servers hold all ten
            assert {r.load for r in gateway.fleet.replicas} == {5}
            one.held.set()


async def test_each_replica_proves_a_version_before_it_is_routed_to(
    nats_config: NatsConfig, tmp_path: Path
) -> None:
    one, two = FakeVllm(), FakeVllm()
    async with parts(nats_config, tmp_path, [one, two]) as gateway:
        two.refuse_load = True
        await publish_adapter(gateway.broker, 1)
        await gateway.until(lambda: gateway.fleet.replicas[0].holds("tictactoe@1"))
        assert gateway.router.current("tictactoe") == "tictactoe@0"
        two.refuse_load = False
        await gateway.until(lambda: gateway.router.current("tictactoe") == "tictactoe@1")
        recorded = await gateway.broker.read(PolicyLoaded)
        proofs = Counter(r.event.replica for r in recorded)
        assert proofs == {r.name: 1 for r in gateway.fleet.replicas}


async def test_a_dead_replica_is_left_out_and_comes_back_proved(
    nats_config: NatsConfig, tmp_path: Path
) -> None:
    one, two = FakeVllm(), FakeVllm()
    async with parts(nats_config, tmp_path, [one, two]) as gateway:
        await publish_adapter(gateway.broker, 1)
        await gateway.until(lambda: gateway.fleet.available("tictactoe@1"))
        await one.stop()
        for _ in range(6):
            status, answer = await gateway.call()
            assert (status, answer["model"]) == (200, "tictactoe@1")
        before = len(one.calls)
        await one.start()
        await gateway.until(lambda: len(gateway.fleet.ready()) == 2)
        assert set(one.loaded) == {"tictactoe@1"}
        for _ in range(4):
            await gateway.call()
        assert len(one.calls) >= before


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


async def test_where_none_is_up_the_wait_ends(nats_config: NatsConfig, tmp_path: Path) -> None:
    one = FakeVllm()
    async with parts(nats_config, tmp_path, [one], wait_s=0.5) as gateway:
        await one.stop()
        with pytest.raises(ApiError) as refused:
            await gateway.call()
        assert (refused.value.status, refused.value.code) == (503, "no_replica")
        await one.start()
        await gateway.until(gateway.fleet.ready)
        assert (await gateway.call())[0] == 200
