"""Training on a branch of the log, which ends by itself, and whose version `main` may adopt."""

from pathlib import Path

import anyio
import msgspec
import pytest

from pipeline.config import Config
from pipeline.events import CheckpointPublished
from pipeline.log.broker import Broker
from store.lake.lake import open_lake
from store.lake.versions import copy_version
from tests.trainer import kit
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.datasets import adopt
from trainer.service import train

BRANCH = "other"


def on_branch(config: Config, **trainer: object) -> Config:
    return msgspec.structs.replace(config, trainer=msgspec.structs.replace(config.trainer, branch=BRANCH, **trainer))


async def replayed(broker: Broker, name: str, tiny_base: str, sampled: list[int], step: int) -> None:
    """A replayed group. What version 0 sampled has the logprobs of the base model, the rest made-up ones: those of
    versions that the branch does not have."""
    logprobs = kit.logprobs_of(tiny_base, [5, 6], sampled) if step == 0 else [-2.0] * len(sampled)
    scored = kit.group(name, [0.0, 1.0], step=step, exchanges=1, branch=BRANCH, offline=True, origin=f"main/{step + 1}")
    for member in scored.members:
        await broker.publish(kit.exchange(member.trajectory, 0, [5, 6], sampled, logprobs=logprobs, step=step))
    await broker.publish(scored)


async def of_branch(broker: Broker, branch: str) -> list[CheckpointPublished]:
    return [event for event in await kit.checkpoints(broker) if event.branch == branch]


@pytest.mark.timeout(200)
async def test_a_branch_trains_what_later_versions_of_main_sampled_and_ends_when_it_is_empty(
    settings: kit.Settings, broker: Broker, tiny_base: str
) -> None:
    config = settings(logprob_bound=1e-3)
    for number in range(5):  # the fifth group fills no step
        await replayed(broker, f"g{number}", tiny_base, [7, 8 + number], step=number // 2)
    with anyio.fail_after(100):
        await train(on_branch(config), lambda **_: None, until_empty=True)
    first, second = await of_branch(broker, BRANCH)
    assert "on_policy_logprob_diff" in first.metrics  # version 0 is the branch's own
    assert "on_policy_logprob_diff" not in second.metrics  # version 1 is not that which sampled
    assert second.metrics["staleness_max"] == 0
    assert await kit.dead_letters(broker) == []


@pytest.mark.timeout(200)
async def test_main_goes_on_from_the_version_that_it_adopts(
    settings: kit.Settings, broker: Broker, tiny_base: str, tmp_path: Path
) -> None:
    config = settings(groups_per_step=1, keep_checkpoints=10)
    await kit.publish_group(broker, "m0", [0.0, 1.0], seed=1)
    for number in range(3):
        await replayed(broker, f"g{number}", tiny_base, [7, 8 + number], step=0)
    await broker.publish(kit.group("e0", [0.0, 1.0], model=f"{kit.MODEL}+{BRANCH}"))  # evaluates the branch
    for branch in (config, on_branch(config)):
        await train(branch, lambda **_: None, until_empty=True)
    lake = open_lake(config)
    last = (await of_branch(broker, BRANCH))[-1]
    await copy_version(broker, lake.storage, "all", last)

    source = f"{tmp_path}#{BRANCH}/{last.version}"
    adopted = await adopt(config, source)
    await kit.publish_group(broker, "m1", [0.0, 1.0], seed=2, step=2)
    await train(config, lambda **_: None, until_empty=True)

    assert adopted == f"{kit.MODEL}@2"
    main = await of_branch(broker, "main")
    assert [(e.step, e.parent, e.source) for e in main] == [
        (1, f"{kit.MODEL}@0", ""),
        (2, f"{kit.MODEL}@1", source),
        (3, f"{kit.MODEL}@2", ""),
    ]
    assert main[1].adapter_sha256 == last.adapter_sha256
    mine, theirs = (Checkpoints.of(c, kit.MODEL).read(s)[1] for c, s in ((config, 2), (on_branch(config), 3)))
    assert mine["state.pt"] == theirs["state.pt"]  # the optimizer goes on, too
    assert await kit.dead_letters(broker) == []
