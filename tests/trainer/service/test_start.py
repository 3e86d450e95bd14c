"""Training that begins with a version from elsewhere (`models.0.start`), and that resumes without its disk."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from pipeline.config import Config, ConfigError, StoreConfig
from pipeline.events import STATE_FILE, CheckpointPublished
from pipeline.log.broker import Broker
from pipeline.versions.lake_files import checkpoint_folder
from store.lake.lake import Lake, lake_in, open_lake
from store.lake.versions import copy_version
from tests.store.conftest import object_store, s3_server
from tests.trainer import kit
from tests.trainer.kit import checkpoints, running, steps_reach
from trainer.checkpoints.start import read_start
from trainer.engine.state import Weights

__all__ = ["object_store", "s3_server"]  # fixtures


def with_start(config: Config, start: str) -> Config:
    model = msgspec.structs.replace(config.models[0], start=start)
    return msgspec.structs.replace(config, models=(model,))


def weights(config: Config, step: int) -> Weights:
    folder = Path(config.run_dir, "checkpoints", "p", "main", kit.MODEL, f"step-{step:08d}")
    return load_file(folder / "adapter_model.safetensors")


def largest_difference(a: Weights, b: Weights) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


async def train(config: Config, steps: int, *, first: int = 0) -> CheckpointPublished:
    """Train a group for each step up to `steps`; equal steps train equal groups. Returns the last checkpoint."""
    async with Broker.connect(config.nats) as broker:
        for i in range(first, steps):
            await kit.publish_group(broker, f"g{i}", [0.0, 1.0], seed=i, step=i)
        async with running(config):
            return (await steps_reach(broker, steps - first + (first > 0)))[-1]


async def copy_to_lake(config: Config, lake: Lake, step: int) -> None:
    async with Broker.connect(config.nats) as broker:
        for event in await checkpoints(broker):
            if event.step == step:
                await copy_version(broker, lake.storage, "all", event)


async def test_another_machine_resumes_with_the_optimizer(on_new_log: kit.Settings) -> None:
    """Steps 3 and 4 with the disk of steps 1 and 2, and without it: the same weights, at the schedule's rates."""
    trained = []
    for name in ("kept", "lost"):
        config = on_new_log(name, groups_per_step=1, max_steps=5, **{"optimizer.schedule": "linear"})
        await train(config, 2)
        if name == "lost":
            shutil.rmtree(config.run_dir)
        async with Broker.connect(config.nats) as broker, running(config) as facts:
            assert facts == {"step": 2}
            for i in (2, 3):  # sampled a step before
                await kit.publish_group(broker, f"g{i}", [0.0, 1.0], seed=i, step=i - 1)
            events = await steps_reach(broker, 4)
        assert [e.metrics["learning_rate"] for e in events] == pytest.approx([1e-2, 8e-3, 6e-3, 4e-3])
        trained.append(weights(config, 4))
    assert largest_difference(*trained) < 1e-6


@pytest.mark.timeout(300)
async def test_forks_of_step_40_from_the_lake_alone_go_on_as_the_original(
    on_new_log: kit.Settings, tmp_path: Path, object_store: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder, and from object storage; without the optimizer the next step is another one."""
    original = on_new_log("original", groups_per_step=1)
    await train(original, 41)
    expected = weights(original, 41)
    store = StoreConfig(**object_store)
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_store["s3_endpoint"])
    lakes = (lake_in(tmp_path / "lake"), open_lake(msgspec.structs.replace(original, store=store)))
    for lake in lakes:
        await copy_to_lake(original, lake, step=40)
    shutil.rmtree(original.run_dir)
    shutil.copytree(tmp_path / "lake", tmp_path / "adapters")
    (tmp_path / "adapters" / checkpoint_folder("p", "main", kit.MODEL, 40) / STATE_FILE).unlink()

    for number, place in enumerate((f"{tmp_path}/lake", store.dir, f"{tmp_path}/adapters")):
        start = f"{place}#{kit.MODEL}@40"
        config = on_new_log(f"fork-{number}", groups_per_step=1)
        fork = with_start(msgspec.structs.replace(config, store=store), start)
        await train(fork, 41, first=40)
        difference = largest_difference(expected, weights(fork, 41))
        assert difference > 1e-4 if place.endswith("adapters") else difference < 1e-6
        async with Broker.connect(config.nats) as broker:
            first, second = await checkpoints(broker)
        assert (first.step, first.source, first.groups) == (40, start, ())
        assert (second.step, second.parent, second.source) == (41, f"{kit.MODEL}@40", "")
        async with running(fork) as facts:  # a start that was used is not used again
            assert facts == {"step": 41}


async def test_a_fork_that_died_before_its_first_version_was_on_the_log_publishes_it(
    on_new_log: kit.Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = on_new_log("original", groups_per_step=1)
    await train(original, 2)
    await copy_to_lake(original, lake_in(tmp_path / "lake"), step=2)
    fork = with_start(on_new_log("fork"), f"{tmp_path}/lake#{kit.MODEL}@2")

    async def die(*_: object) -> None:
        raise ConnectionError("the machine lost its network")

    with monkeypatch.context() as patch:
        patch.setattr("trainer.checkpoints.commits.Commits.publish", die)
        with pytest.RaisesGroup(ConnectionError, flatten_subgroups=True):
            async with running(fork):
                pass
    async with Broker.connect(fork.nats) as broker:
        assert not await checkpoints(broker)
        async with running(fork) as facts:
            assert facts == {"step": 2}
        assert [e.step for e in await checkpoints(broker)] == [2]


async def test_training_begins_with_a_peft_adapter(on_new_log: kit.Settings, tiny_base: str, tmp_path: Path) -> None:
    """PEFT's own folder: its targets are in any order, and it has no training state."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = on_new_log("run", groups_per_step=1)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"]
    lora = LoraConfig(r=4, lora_alpha=int(config.trainer.lora.alpha), target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_base), lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    event = await train(with_start(config, str(tmp_path / "adapter")), 2, first=1)
    assert (event.step, event.parent) == (2, f"{kit.MODEL}@1")
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert largest_difference(weights(config, 1), adapter) < 1e-6


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ({"peft_type": "IA3"}, "uses peft_type=IA3"),
        ({"bias": "all"}, "uses bias=all"),
        ({"layers_to_transform": 0}, "uses layers_to_transform"),
        ({"use_dora": True, "modules_to_save": None}, "uses use_dora,"),
    ],
)
async def test_an_adapter_that_the_trainer_does_not_train_is_refused(
    setting: dict[str, object], error: str, tmp_path: Path
) -> None:
    config = {"peft_type": "LORA", "bias": "none", "use_rslora": False, "rank_pattern": {}, "r": 4} | setting
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=error):
        read_start(str(tmp_path), Config(project="p"))


@pytest.mark.parametrize(
    ("start", "error"),
    [
        ("nowhere", "neither a folder with adapter_config.json nor a version"),
        ("{lake}#tiny", "neither a folder"),
        ("{lake}#tiny@7", "holds no checkpoints/p/main/tiny/step-00000007"),
        ("{lake}#other/main/tiny@1", "holds no checkpoints/other/main/tiny"),
        ("{lake}#org%2Fm@3", "holds no checkpoints/p/main/org%2Fm/step-00000003"),
        ("{lake}#org/m@3", "holds no checkpoints/p/org/m/step-00000003: .* a slash within a name is written as %2F"),
    ],
)
async def test_an_unusable_start_is_refused(start: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    with pytest.raises(ConfigError, match=error):
        read_start(start.format(lake=tmp_path / "lake"), Config(project="p"))


async def test_a_damaged_version_and_another_base_are_refused(on_new_log: kit.Settings, tmp_path: Path) -> None:
    config = on_new_log("original", groups_per_step=1)
    await train(config, 1)
    await copy_to_lake(config, lake_in(tmp_path / "lake"), step=1)
    start = f"{tmp_path}/lake#{kit.MODEL}@1"
    other = msgspec.structs.replace(config.models[0], base=kit.make_model(tmp_path / "other", seed=9))
    fork = msgspec.structs.replace(on_new_log("fork"), models=(other,))
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="another base model"), flatten_subgroups=True):
        async with running(with_start(fork, start)):
            pass
    folder = tmp_path / "lake" / checkpoint_folder("p", "main", kit.MODEL, 1)
    (folder / "state.pt").write_bytes(b"cut")
    with pytest.raises(ConfigError, match=r"state\.pt does not match"):
        read_start(start, config)
