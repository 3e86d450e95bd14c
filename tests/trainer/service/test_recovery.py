"""What the service does at its start, and after a log or a process was away."""

import shutil
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import pytest

from pipeline import streams
from pipeline.config import ConfigError, NatsConfig
from pipeline.events import GroupDiscarded
from pipeline.log.broker import Broker, Consumption, Delivery
from tests.conftest import NatsServer
from tests.kits.log import take
from tests.kits.waiting import until
from tests.trainer import kit
from tests.trainer.kit import all_acked, discards, running, steps_reach
from trainer import recovery, service
from trainer.checkpoints import checkpoint
from trainer.checkpoints.commits import Commits, TrainerError
from trainer.recovery import catch_up


async def test_a_restarted_trainer_trains_a_group_with_a_too_large_trajectory(settings: kit.Settings) -> None:
    """A predecessor died holding it. A discard for another reason would mean that it is done with."""
    config = settings(groups_per_step=1)
    spec = streams.trainer_consumer("main")
    async with Broker.connect(config.nats) as broker:
        await broker.provision_consumer(spec)
        for name, reason in (("done", "no_variance"), ("part", "too_large")):
            scored = await kit.publish_group(broker, name, [0.0, 1.0], seed=1)
            await broker.publish(
                GroupDiscarded(
                    project="p",
                    group=name,
                    model=kit.MODEL,
                    trajectories=(f"{name}-0",),
                    reason=reason,
                    by="trainer",
                    judge=scored.judge,
                )
            )
        async with broker.consume(spec) as consumption:
            await take(consumption, 2)
        async with running(config):
            (event,) = await steps_reach(broker, 1)
            assert event.groups == ("part",)


async def test_the_last_step_after_a_restart_acknowledges_a_group_that_the_server_delivers_again_later(
    settings: kit.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(groups_per_step=1, max_steps=1)
    stepped = anyio.Event()
    run_steps, batch = service.Trainer.run_steps, Consumption.batch

    async def then_say(self: service.Trainer, until_empty: bool) -> None:
        await run_steps(self, until_empty)
        stepped.set()

    async def after_the_last_step(self: Consumption, limit: int, wait_s: float = 1.0) -> list[Delivery]:
        await stepped.wait()
        return await batch(self, limit, wait_s)

    monkeypatch.setattr(service.Trainer, "run_steps", then_say)
    monkeypatch.setattr(Consumption, "batch", after_the_last_step)
    async with Broker.connect(config.nats) as broker:
        await kit.publish_group(broker, "g0", [0.0, 1.0], seed=1)
        async with broker.consume(streams.consumer("trainer")) as held:
            assert len(await batch(held, 1, 60.0)) == 1  # the trainer before this one, which stops
        async with running(config):
            await steps_reach(broker, 1)
            await all_acked(broker)


async def test_a_damaged_adapter_of_an_earlier_step_stops_no_start(
    nats_config: NatsConfig, tiny_base: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On disk and, without it, in the object store. That of the newest step does."""

    def passed_over() -> list[str]:
        warnings = [r for r in caplog.records if "earlier adapter" in r.getMessage()]
        return [r.fields["reason"] for r in warnings]  # type: ignore[attr-defined]

    config = kit.settings(tiny_base, tmp_path / "run", nats_config, groups_per_step=1)
    async with Broker.connect(nats_config) as broker:
        async with running(config):
            for i in range(3):
                await kit.publish_group(broker, f"g{i}", [0.0, 1.0], seed=i, step=i)
                events = await steps_reach(broker, i + 1)
        folder = checkpoint.Checkpoints.of(config, kit.MODEL)
        (folder.path(2) / "adapter_model.safetensors").write_bytes(b"damaged")
        async with running(config) as facts:
            assert facts == {"step": 3}
        (warning,) = passed_over()
        assert "step-00000002/adapter_model.safetensors does not match" in warning
        shutil.rmtree(tmp_path / "run")
        await broker.put_object(streams.ADAPTERS_BUCKET, events[1].adapter, b"damaged")
        async with running(config) as facts:
            assert facts == {"step": 3}
            assert "the adapter of tiny@2 in the object store does not match" in passed_over()[-1]
            await kit.publish_group(broker, "late", [0.0, 1.0], seed=9, step=2)
            (*_, event) = await steps_reach(broker, 4)
            assert event.groups == ("late",)
        await broker.put_object(streams.ADAPTERS_BUCKET, event.adapter, b"damaged")
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(checkpoint.CheckpointError, match=r"the adapter of tiny@4 .* restore the object store"):
            await service.serve(config, lambda **_: None)


async def test_another_logs_checkpoints_are_refused_also_if_none_is_newer(
    training: kit.Training, on_new_log: kit.Settings
) -> None:
    """A log that was restored from a backup has another identity, and a checkpoint of the disk."""
    async with training(groups_per_step=1) as broker:
        await kit.publish_group(broker, "g", [0.0, 1.0])
        (event,) = await steps_reach(broker, 1)
    fresh = on_new_log("", groups_per_step=1)  # the run directory of before
    with pytest.raises(TrainerError, match="checkpoints of another log"):
        await service.serve(fresh, lambda **_: None)
    for events, refused in (((7,), True), ((1, 7), True), ((7, event), False)):
        config = on_new_log("", groups_per_step=1)
        learner = service.make_learners(config)[kit.MODEL]
        identity = learner.checkpoints.log_id()
        async with Broker.connect(config.nats) as other:
            for of_log in events:
                await other.publish(of_log if of_log is event else kit.checkpoint_event(of_log))
            commits = Commits(other, config)
            if refused:
                with pytest.raises(TrainerError, match=r"none of the steps on disk.*checkpoints of another log"):
                    await catch_up(commits, learner)
                assert learner.checkpoints.log_id() == identity
            else:
                recovery._refuse_foreign_log(learner, await commits.published(kit.MODEL), "restored")


async def test_a_second_trainer_on_the_same_model_is_an_error(settings: kit.Settings, broker: Broker) -> None:
    config = settings(groups_per_step=1)
    await kit.publish_group(broker, "g0", [0.0, 1.0], seed=1)
    learners = service.make_learners(config)
    trainer = service.Trainer(config, broker, learners, service.GpuTurns(config))
    event = kit.checkpoint_event(1)
    manifest = checkpoint.Manifest(event=event, config={})
    files = dict.fromkeys(checkpoint.ADAPTER_FILES, b"x")
    await trainer.commits.publish(manifest, files)
    await trainer.commits.publish(manifest, files)  # a retry of the same
    another = msgspec.structs.replace(event, adapter_sha256="2")
    with pytest.raises(TrainerError, match="second trainer"):
        await trainer.commits.publish(checkpoint.Manifest(event=another, config={}), files)


async def test_training_continues_after_the_log_was_unavailable(
    training: kit.Training, nats_server: NatsServer
) -> None:
    async with training(groups_per_step=1) as broker:
        await kit.publish_group(broker, "g0", [0.0, 1.0], seed=1)
        await steps_reach(broker, 1)
        nats_server.kill()
        await anyio.to_thread.run_sync(nats_server.start)
        await kit.publish_group(broker, "g1", [0.0, 1.0], seed=2, step=1)
        events = await steps_reach(broker, 2)
        assert [e.groups for e in events] == [("g0",), ("g1",)]


async def test_a_restart_keeps_the_best_checkpoints_statistics(settings: kit.Settings, broker: Broker) -> None:
    """Regression: eight more rewards of the best checkpoint replaced its hundred, and a worse one became the best."""
    config = settings()
    folder = checkpoint.Checkpoints.of(config, kit.MODEL)

    async def validate(name: str, rewards: list[float], step: int) -> Any:
        await broker.publish(kit.group(name, rewards, step=step, split="val"))

        async def discarded() -> bool:
            return name in {d.group for d in await discards(broker)}

        await until(discarded)
        return folder.best()

    async with running(config):
        before = await validate("hundred", [0.5, 1.0] * 50, 1)
    async with running(config):
        after = await validate("eight", [0.0] * 8, 1)
        worse = await validate("worse", [0.5] * 8, 2)
    assert (before.step, before.rewards.count, before.rewards.mean) == (1, 100, 0.75)
    assert (after.step, after.rewards.count, after.rewards.mean) == (1, 108, pytest.approx(75 / 108))
    assert worse.step == 1


async def test_checkpoints_of_another_base_model_scale_rank_or_targets_are_refused(
    nats_config: NatsConfig, tiny_base: str, tmp_path: Path
) -> None:
    """From the disk and, without it, from the object store. The same base model elsewhere is none of another."""
    config = kit.settings(tiny_base, tmp_path / "run", nats_config, groups_per_step=1)
    async with Broker.connect(nats_config) as broker, running(config):
        await kit.publish_group(broker, "g", [0.0, 1.0], seed=1)
        await steps_reach(broker, 1)
    shutil.copytree(tiny_base, tmp_path / "moved")
    other = kit.make_model(tmp_path / "other", seed=1)
    refused: list[tuple[str, str, dict[str, object]]] = [
        ("models.base", other, {}),
        ("trainer.lora.alpha", tiny_base, {"lora.alpha": 4.0}),
        ("trainer.lora.rank", tiny_base, {"lora.rank": 2}),
        ("trainer.lora.targets", tiny_base, {"lora.targets": ("q_proj",)}),
    ]
    for _ in ("disk", "object store"):
        for setting, base, changed in refused:
            with pytest.raises(ConfigError, match=setting):
                await service.serve(kit.settings(base, tmp_path / "run", nats_config, **changed), lambda **_: None)
        async with running(kit.settings(str(tmp_path / "moved"), tmp_path / "run", nats_config)) as facts:
            assert facts == {"step": 1}
        shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize("other", ["verdict set", "split"])
async def test_a_group_of_whose_name_another_was_discarded_trains_after_a_death(
    settings: kit.Settings, broker: Broker, other: str
) -> None:
    """Regression: a trainer that started again took the discard under the first judge, or of the validation group, for
    one of the waiting group."""
    config = settings()
    discarded, waiting = kit.group("one", [0.5, 0.5]), {"judge": "labels", "offline": True, "origin": "main/1"}
    if other == "split":
        discarded, waiting = kit.group("one", [0.0, 1.0], split="val"), {}
    async with kit.running(config):
        await kit.publish_group(broker, "one", [0.0, 1.0], **waiting)
        await broker.publish(discarded)
        await until(lambda: kit.discards(broker))
        await until(lambda: one_waits(broker))
    async with kit.running(config):
        await kit.publish_group(broker, "other", [0.0, 1.0], seed=1)
        (event,) = await kit.steps_reach(broker, 1)
        assert event.groups == ("one", "other")


async def one_waits(broker: Broker) -> bool:
    info = await broker.consumer_info(streams.consumer("trainer"))
    return info.num_ack_pending == 1 and not info.num_pending
