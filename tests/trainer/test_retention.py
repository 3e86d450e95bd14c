"""Adapters that nothing needs are removed; those that serve or may serve are kept."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import anyio
import msgspec
import nats.errors
import pytest

from journeywork.statistics import Sample
from pipeline.config import Config, NatsConfig, RetentionConfig
from pipeline.events import (
    STATE_FILE,
    CheckpointPublished,
    PolicyEvaluated,
    PolicyLoaded,
    PolicyPromoted,
    PolicyRetired,
    PolicyUnloaded,
    TrajectoryCompleted,
    TrajectoryOpened,
)
from pipeline.log import objects
from pipeline.log.broker import Broker
from pipeline.log.messages import LogEntry
from pipeline.versions.loaded import LoadedVersions
from rollout_gateway.serving.policies import Policies
from tests.kits import events
from tests.kits.log import read_stream
from tests.trainer import kit
from tests.trainer.kit import all_acked, running, steps_reach
from trainer.checkpoints.checkpoint import Best
from trainer.checkpoints.validation import Validation
from trainer.retention import Retention

V = [f"tiny@{i}" for i in range(13)]


def retained(config: Config, **settings: float) -> Config:
    retention = RetentionConfig(**{"grace_s": 0.0, **settings})  # type: ignore[arg-type]
    return msgspec.structs.replace(config, retention=retention)


def learners_of(config: Config) -> dict[str, Any]:
    """What retention asks a learner for, without its model."""
    (model,) = config.models
    return {"tiny": SimpleNamespace(model=model, settings=config.trainer, validation=Validation(None, 8))}


async def publish(
    broker: Broker, step: int, branch: str = "main", *, adapter: str = "", state: str = ""
) -> CheckpointPublished:
    name = adapter or f"p/tiny@{step}/{branch}"
    await broker.put_object("ADAPTERS", name, b"adapter" * 100)
    files = {STATE_FILE: state} if state else {}
    event = events.checkpoint(step, "tiny", branch=branch, adapter=name, adapter_bytes=700, files=files)
    if state:
        await broker.put_object("ADAPTERS", event.state, b"state" * 100)
    await broker.publish(event)
    return event


async def present(broker: Broker, branch: str = "main") -> set[str]:
    return {V[i] for i in range(1, 13) if await objects.exists(broker, "ADAPTERS", f"p/tiny@{i}/{branch}")}


def loaded(version: str, replica: str = "r", server_start: str = "1") -> PolicyLoaded:
    return events.loaded(int(version[5:]), "tiny", replica=replica, server_start=server_start)


def unloaded(version: str, replica: str = "r", server_start: str = "1") -> PolicyUnloaded:
    return PolicyUnloaded(project="p", model="tiny", version=version, replica=replica, server_start=server_start)


def promoted(action: Any, version: str = "", request: str = "", *, model: str = "tiny", **of: Any) -> PolicyPromoted:
    return PolicyPromoted(project="p", model=model, version=version, action=action, request=request, **of)


@pytest.fixture
def config(nats_config: NatsConfig, tmp_path: Path) -> Config:
    return retained(kit.settings("base", tmp_path, nats_config, max_staleness=0), adapters=2)


async def test_versions_that_are_needed_are_kept(broker: Broker, config: Config) -> None:
    learners = learners_of(config)
    for step in range(1, 13):
        await publish(broker, step)
    await publish(broker, 1, branch="other")
    learners["tiny"].validation.best = Best(2, Sample.of([0.9] * 8))
    await broker.publish(promoted("split", V[5], "1", other=V[7], percent=50))
    await broker.publish(promoted("promote", V[6], "1b"))
    await broker.publish(promoted("split", V[4], model="master", other="outside:master"))
    opened = TrajectoryOpened(project="p", trajectory="run", model="tiny", group="g", pinned=V[9])
    await broker.publish(opened)
    await broker.publish(loaded(V[1], "old life", "1"))
    await broker.publish(loaded(V[10], "old life", "2"))  # it started anew and holds nothing of before
    await broker.publish(loaded(V[3], "r"))
    await broker.publish(loaded(V[8], "r"))
    await broker.publish(unloaded(V[8]))
    retention = Retention(config, broker, learners)
    await retention.run_once()
    retired = {r.event.version for r in await broker.read(PolicyRetired)}
    assert retired == {V[1], V[8]}
    assert await present(broker) == set(V[1:])  # told first, removed later
    await retention.run_once()
    # 2 best, 3 held, 4 for a master, 6 decided after the split of 5 and 7, 9 pinned, 10 held, 11 and 12 newest.
    assert await present(broker) == {V[i] for i in (2, 3, 4, 5, 6, 7, 9, 10, 11, 12)}
    assert await present(broker, "other") == {V[1]}  # another trainer's

    # The run ends, the split ends, the server lets go.
    await broker.publish(TrajectoryCompleted(project="p", trajectory="run", model="tiny", group="g", outcome="masked"))
    await broker.publish(promoted("follow", request="2"))
    await broker.publish(unloaded(V[3]))
    await retention.run_once()
    await retention.run_once()
    assert await present(broker) == {V[2], V[4], V[6], V[10], V[11], V[12]}


async def test_the_version_that_training_began_with_and_those_of_evaluations_are_kept(
    broker: Broker, config: Config
) -> None:
    """The warm start, the natural baseline, was removed after 20 steps, and after 40 no first version was left that
    could play on other prompts."""
    model = msgspec.structs.replace(config.models[0], start="runs/x#tiny@4")
    for step in range(4, 13):
        await publish(broker, step)
    for position, version in enumerate((V[6], V[0], "")):
        played = {"entrant": version or "https://h/v1#m", "kind": "policy" if version else "external"}
        evaluated = {"evaluation": "e", "position": position, "model": "tiny" if version else "m", "version": version}
        await broker.publish(PolicyEvaluated(project="p", **played, **evaluated))
    config = msgspec.structs.replace(config, models=(model,))
    retention = Retention(config, broker, learners_of(config))
    await retention.run_once()
    await retention.run_once()
    assert await present(broker) == {V[4], V[6], V[11], V[12]}


async def test_a_retired_version_that_is_needed_again_is_kept(broker: Broker, config: Config) -> None:
    for step in range(1, 6):
        await publish(broker, step)
    config = retained(config, adapters=2, grace_s=3600.0)
    retention = Retention(config, broker, learners_of(config))
    await retention.run_once()
    await retention.run_once()
    assert await present(broker) == set(V[1:6])  # the time of grace runs
    await broker.publish(loaded(V[1]))
    await retention.run_once()
    history = await read_stream(broker, "POLICY")
    policies = Policies("p", ["tiny"])
    for recorded in history:
        policies.apply(recorded)
    assert V[1] not in policies.retired
    assert policies.knows(V[2])  # it serves where it serves
    assert V[2] in policies.retired
    assert V[2] not in policies.names()


async def test_a_branch_keeps_the_states_that_another_one_resumes_from(broker: Broker, config: Config) -> None:
    """A fork publishes the version that it begins at with the same objects."""

    def of_branch(config: Config, branch: str) -> Retention:
        trainer = msgspec.structs.replace(config.trainer, branch=branch)
        config = msgspec.structs.replace(config, trainer=trainer)
        return Retention(config, broker, learners_of(config))

    published: dict[str, str] = {}
    """Object of each state, by its hash."""

    async def publish_state(step: int, state: str, branch: str = "main", adapter: str = "") -> None:
        published[state] = (await publish(broker, step, branch, adapter=adapter, state=state)).state

    async def states() -> list[str]:
        return [s for s, name in published.items() if await objects.exists(broker, "ADAPTERS", name)]

    main, fork = of_branch(config, "main"), of_branch(config, "fork")
    for step in (1, 2):
        await publish_state(step, f"s{step}")
    await publish_state(2, "s2", "fork", adapter="p/tiny@2/main")
    for step in (3, 4):
        await publish_state(step, f"f{step}", "fork")
    for _ in range(2):
        await fork.run_once()
    assert await states() == ["s1", "s2", "f3", "f4"], "main is at 2"
    assert await present(broker) == {V[1], V[2]}
    for step in (3, 4, 5):
        await publish_state(step, f"s{step}")
    await main.run_once()
    assert await states() == ["f3", "f4", "s4", "s5"], "neither resumes from 2"
    await main.run_once()
    assert await present(broker) == {V[4], V[5]}, "both branches have retired 2"


async def test_old_policy_events_of_removed_versions_are_deleted(broker: Broker, config: Config) -> None:
    for step in range(1, 5):
        await publish(broker, step)
        await broker.publish(loaded(V[step], server_start=str(step)))
    for request in ("1", "2"):
        await broker.publish(promoted("follow", request=request))
    retention = Retention(config, broker, learners_of(config))
    for _ in range(2):
        await retention.run_once()

    async def left() -> list[LogEntry]:
        return await read_stream(broker, "POLICY")

    before = len(await left())
    assert await retention.delete_old_events(0) == 0
    assert len(await left()) == before
    assert await retention.delete_old_events(2**62) > 0
    events = [r.event for r in await left()]
    assert {e.version for e in events if isinstance(e, CheckpointPublished)} == {V[3], V[4]}
    assert {e.version for e in events if isinstance(e, PolicyLoaded)} == {V[3], V[4]}
    assert [e.request for e in events if isinstance(e, PolicyPromoted)] == ["1", "2"], "a rollback needs them"
    assert not [e for e in events if isinstance(e, PolicyRetired)]
    await broker.delete("POLICY", 1)  # an attempt whose answer was lost is repeated


async def test_parts_of_an_interrupted_upload_or_removal_are_removed(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.put_object("ADAPTERS", "kept", b"k" * 300_000)
    await broker.put_object("ADAPTERS", "kept", b"n" * 300_000)  # replaced: the chunks of before are gone
    for _ in range(3):
        await broker.js.publish("$O.ADAPTERS.C.orphan", b"x" * 1000)
    await broker.put_object("ADAPTERS", "removed", b"r" * 1000)
    store = await broker.js.object_store("ADAPTERS")
    with monkeypatch.context() as interrupted:  # nats-py marks an object as deleted before it deletes the chunks
        interrupted.setattr(store._js, "purge_stream", mock.AsyncMock(side_effect=nats.errors.TimeoutError))
        with pytest.raises(nats.errors.TimeoutError):
            await store.delete("removed")
    subjects = await broker.subjects("OBJ_ADAPTERS", "$O.ADAPTERS.C.*")
    assert len(subjects) == 3
    assert await objects.sweep(broker, "ADAPTERS", 0) == 0  # as young as an upload under way
    assert await objects.sweep(broker, "ADAPTERS", 2**62) == 2
    assert await broker.get_object("ADAPTERS", "kept") == b"n" * 300_000
    assert "$O.ADAPTERS.C.orphan" not in await broker.subjects("OBJ_ADAPTERS", "$O.ADAPTERS.C.*")


async def test_the_trainer_removes_old_versions_while_it_trains(settings: kit.Settings) -> None:
    config = settings(groups_per_step=1, max_staleness=0)
    config = retained(config, adapters=2, every_s=0.05)
    async with Broker.connect(config.nats) as broker, running(config):
        for i in range(4):
            await kit.publish_group(broker, f"g{i}", [0.0, 1.0], seed=i, step=i)
            events = await steps_reach(broker, i + 1)
        await all_acked(broker)
        with anyio.fail_after(60):
            while any([await objects.exists(broker, "ADAPTERS", e.adapter) for e in events[:2]]):
                await anyio.sleep(0.05)
        assert [await objects.exists(broker, "ADAPTERS", e.adapter) for e in events] == [False, False, True, True]


def test_in_random_histories_every_version_that_a_server_holds_counts_as_loaded() -> None:
    draw = random.Random(7)
    for _ in range(300):
        versions = V[1 : draw.randint(2, 12)]
        held, truth = LoadedVersions(), {r: ("0", set[str]()) for r in "ab"}
        for _ in range(draw.randint(0, 30)):
            replica = draw.choice("ab")
            life, holds = truth[replica]
            if draw.random() < 0.1:
                truth[replica] = str(int(life) + 1), set()  # told by its next load
                continue
            version = draw.choice(versions)
            if version in holds:
                holds.discard(version)
                held.apply(unloaded(version, replica, life))
            else:
                holds.add(version)
                held.apply(loaded(version, replica, life))
        served = {v for _, holds in truth.values() for v in holds}
        assert served <= {version for version, _ in held.anywhere()}
