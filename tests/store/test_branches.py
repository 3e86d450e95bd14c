"""A replayed branch is judged and trained, and `main` is not affected."""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest

from judge.commands.rejudge import Rejudge
from pipeline.config import Config, NatsConfig
from pipeline.events import (
    CheckpointPublished,
    GroupScored,
    TrajectoryCompleted,
    unpack_seqs,
)
from pipeline.log.broker import Broker
from rollout_gateway.serving.policies import Policies
from store.commands import replay
from store.reading import sql
from tests.store.kit import StoreProcess, until_acked
from tests.trainer import kit
from trainer.service import train

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(200)]

GROUPS = 6


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kit.make_model(tmp_path_factory.mktemp("tiny"))


async def experience(broker: Broker) -> None:
    """Groups as gateway and judge leave them on the log."""
    rng = np.random.default_rng(0)
    for i in range(GROUPS):
        group = kit.group(f"g{i}", rng.random(2).tolist())
        members = []
        for k, member in enumerate(group.members):
            for event in kit.turns(member.trajectory, 10 * i + k):
                await broker.publish(event)
            ended = TrajectoryCompleted(
                project="p", trajectory=member.trajectory, model=kit.MODEL, group=group.group, exchanges=2,
                reward=1.0 - member.reward,
            )  # fmt: skip
            ack = await broker.publish(ended)
            members.append(msgspec.structs.replace(member, completed_seq=ack.seq))
        await broker.publish(msgspec.structs.replace(group, members=tuple(members)))


async def checkpoints(broker: Broker, branch: str) -> list[CheckpointPublished]:
    found = await broker.read(CheckpointPublished, project="p", model=kit.MODEL, branch=branch)
    return [r.event for r in found]


async def scored(broker: Broker, branch: str) -> dict[int, GroupScored]:
    """Groups of a branch by their stream sequence."""
    found = await broker.read(GroupScored)
    return {r.seq: r.event for r in found if r.event.branch == branch}


async def trained(broker: Broker, config: Config, branch: str, steps: int) -> list[CheckpointPublished]:
    """The branch's checkpoints once a trainer has taken it to `steps`; they consumed groups of that branch, each
    once."""
    settings = msgspec.structs.replace(config.trainer, branch=branch, max_steps=steps)
    with anyio.fail_after(120):
        await train(msgspec.structs.replace(config, trainer=settings), lambda **_: None)
    events = await checkpoints(broker, branch)
    assert [(e.step, e.branch) for e in events] == [(n + 1, branch) for n in range(steps)]
    consumed = [s for e in events for s in unpack_seqs(e.group_seqs).tolist()]
    assert len(set(consumed)) == len(consumed) == 2 * steps
    assert set(consumed) <= set(await scored(broker, branch))
    return events


async def test_a_replayed_branch_is_judged_again_and_trained_on(
    broker: Broker, nats_config: NatsConfig, running_store: StoreProcess, tiny_base: str, tmp_path: Path
) -> None:
    config = kit.settings(tiny_base, tmp_path, nats_config)
    await experience(broker)
    main = await trained(broker, config, "main", 2)
    async with running_store():
        await until_acked(broker)
        await broker.js.purge_stream("ROLLOUTS")  # the log has let go of everything
        with sql.connect(tmp_path) as connection:
            chosen = replay.select_groups(connection, where="reward_mean > 0")
            counts = await replay.replay(nats_config, connection, chosen, "colder")
    assert counts == {"groups": GROUPS, "already": 0, "republished": GROUPS * 2 * 3}

    # The same experience, another judge: here the agents' own rewards, which say the opposite.
    report = await Rejudge(broker, config, None, branch="judged", source="colder").run()
    assert (report.rejudged, report.failed, report.gone) == (GROUPS, 0, 0)
    colder, judged = await scored(broker, "colder"), await scored(broker, "judged")
    before = {(e.group, m.trajectory): m.reward for e in colder.values() for m in e.members}
    after = {(e.group, m.trajectory): m.reward for e in judged.values() for m in e.members}
    assert after == {k: pytest.approx(1.0 - v) for k, v in before.items()}
    assert all(e.offline for e in (*colder.values(), *judged.values()))

    # Each branch is trained from its own groups, and goes on after a stop.
    await trained(broker, config, "colder", 1)
    once = await trained(broker, config, "colder", 2)
    again = await trained(broker, config, "judged", 1)
    assert once[0].groups == again[0].groups == main[0].groups
    assert once[0].adapter_sha256 != again[0].adapter_sha256
    assert once[0].parent == again[0].parent == f"{kit.MODEL}@0"

    # The main line is as it was and is all that the gateway serves.
    assert await checkpoints(broker, "main") == main
    policies = Policies("p", [kit.MODEL])
    await policies.rebuild(broker)
    assert policies.newest(kit.MODEL) == f"{kit.MODEL}@2"
    published = policies.checkpoint(f"{kit.MODEL}@1")
    assert published is not None
    assert published.event == main[0]
    folders = {p.name for p in (tmp_path / "checkpoints" / "p").iterdir()}
    assert folders == {"main", "colder", "judged"}

    # It goes on, and passes the groups of other branches by.
    assert (await trained(broker, config, "main", 3))[:2] == main
