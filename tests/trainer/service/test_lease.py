"""Of several trainers of one branch, one trains; another takes over when it dies, and no step is lost or doubled."""

import signal
from pathlib import Path

import anyio
import msgspec
import pytest

from pipeline import streams
from pipeline.config import NatsConfig, save
from pipeline.events import CheckpointPublished, unpack_seqs
from pipeline.log import key_value
from pipeline.log.broker import Broker
from tests.kits.crash.processes import fork_server
from tests.kits.quick_service import quick_consumers
from tests.trainer import kit
from trainer import lease as leases
from trainer.checkpoints.commits import TrainerError
from trainer.lease import Lease


async def test_one_of_several_has_the_lease_until_it_releases_it(broker: Broker, tmp_path: Path) -> None:
    with (
        Lease(broker, kit.settings("base", tmp_path / "a"), "trainer") as first,
        Lease(broker, kit.settings("base", tmp_path / "b"), "trainer") as second,
        Lease(broker, kit.settings("base", tmp_path / "a"), "trainer") as same_folder,
        Lease(broker, kit.settings("base", tmp_path / "a", branch="stricter"), "experiment") as branch,
    ):
        assert await first.take()
        assert await first.take()  # it is renewed
        assert not await second.take()
        assert not await same_folder.take()
        assert await branch.take()
        await second.release()  # releases nothing
        assert not await second.take()
        async with anyio.create_task_group() as tg:
            tg.start_soon(second.wait)
            await first.release()
        assert not await first.take()


async def test_a_trainer_that_starts_again_in_its_folder_has_the_lease_at_once(broker: Broker, tmp_path: Path) -> None:
    for _ in range(2):
        with Lease(broker, kit.settings("base", tmp_path), "trainer") as lease:
            assert await lease.take()


async def test_a_trainer_that_lost_its_lease_ends(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_RENEW_S", 0.01)
    with Lease(broker, kit.settings("base", tmp_path), "trainer") as lease:
        assert await lease.take()
        await key_value.put(broker, streams.FLEET.name, "trainer.p.main", b"another", 10)
        with pytest.raises(TrainerError, match="another trainer trains this branch"):
            await lease.keep()


GROUPS = 12


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_second_trainer_waits_and_takes_over_when_the_first_dies(
    nats_config: NatsConfig, tiny_base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "CONSUMERS", quick_consumers(2.0, endless=True))
    files = []
    for name in "ab":
        (tmp_path / name).mkdir()
        config = kit.settings(
            tiny_base, tmp_path / name, nats_config, groups_per_step=1, max_staleness=100, max_steps=GROUPS
        )
        files.append(tmp_path / f"{name}.toml")
        save(kit.with_many_loras(config), files[-1])
    async with (
        Broker.connect(msgspec.structs.replace(nats_config, provision=True)) as broker,
        fork_server(files[0], "trainer", "tests.trainer.quick_lease", ack_wait_s=2.0) as server,
    ):
        training = server.start("trainer")
        with anyio.fail_after(100):
            await training.ready.wait()
        for death in range(2):
            # The other one is ready and waits.
            waiting = server.start("trainer", config=files[(death + 1) % 2])
            with anyio.fail_after(100):
                await waiting.ready.wait()
            for i in range(death * GROUPS // 2, (death + 1) * GROUPS // 2):
                await kit.publish_group(broker, f"g{i}", [0.0, 1.0], seed=i)
            await kit.steps_reach(broker, death * GROUPS // 2 + 2)
            assert await training.end(signal.SIGKILL) == -signal.SIGKILL
            await kit.steps_reach(broker, (death + 1) * GROUPS // 2)
            training = waiting
        published = await kit.steps_reach(broker, GROUPS)
        await kit.all_acked(broker)
        assert [e.step for e in published] == list(range(1, GROUPS + 1))
        assert len(await broker.read(CheckpointPublished)) == GROUPS
        trained = [seq for e in published for seq in unpack_seqs(e.group_seqs).tolist()]
        assert len(trained) == len(set(trained)) == GROUPS
