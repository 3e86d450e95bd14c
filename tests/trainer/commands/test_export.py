"""`journeywork export` writes folders that other programs load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from pipeline import config as configuration
from pipeline.config import LoraConfig, NatsConfig, TrainerConfig
from pipeline.log.broker import Broker
from tests.kits.vision import make_vision_model
from tests.trainer import kit
from tests.trainer.kit import running, steps_reach
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.commands import export
from trainer.engine import loading

pytestmark = pytest.mark.anyio


@pytest.fixture
async def run_dir(nats_config: NatsConfig, tiny_base: str, tmp_path: Path) -> Path:
    """A run of four steps, of which the oldest are pruned from the disk."""
    config = kit.settings(
        tiny_base, tmp_path / "run", nats_config, groups_per_step=1, keep_checkpoints=1, max_staleness=0
    )
    configuration.save(config, config.path("config.toml"))
    async with Broker.connect(nats_config) as broker, running(config):
        for i in range(4):
            await kit.publish_group(broker, f"g{i}", [0.0, 1.0], seed=i, step=i)
            await steps_reach(broker, i + 1)
    return tmp_path / "run"


async def test_adapter_and_merged_weights_agree(
    run_dir: Path, tiny_base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export.main([str(tmp_path / "adapter"), "--run-dir", str(run_dir)])
    assert "tiny@4" in capsys.readouterr().out
    export.main([str(tmp_path / "merged"), "--run-dir", str(run_dir), "--merged"])
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(tiny_base)
        plain = base(input_ids=ids).logits.clone()
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")(input_ids=ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=ids).logits
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4)
    assert (adapted - plain).abs().max() > 1e-3


async def test_step_best_exports_the_step_with_the_best_validation_reward(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as none:
        export.main([str(tmp_path / "out"), "--run-dir", str(run_dir), "--step", "best"])
    assert none.value.code == 1
    checkpoints = Checkpoints(run_dir / "checkpoints" / "p" / "main" / kit.MODEL)
    (checkpoints.folder / checkpoint.BEST_FILE).write_bytes(b"")
    with pytest.raises(SystemExit):
        export.main([str(tmp_path / "out"), "--run-dir", str(run_dir), "--step", "best"])
    assert "best.json is damaged" in capsys.readouterr().err
    checkpoints.set_best(checkpoint.Best(3, 0.5, 4))
    export.main([str(tmp_path / "out"), "--run-dir", str(run_dir), "--step", "best"])
    assert {p.name for p in (tmp_path / "out").iterdir()} == set(checkpoint.ADAPTER_FILES)


async def test_a_pruned_step_comes_from_the_log(run_dir: Path, nats_config: NatsConfig, tmp_path: Path) -> None:
    import anyio.to_thread

    with pytest.raises(SystemExit) as pruned:
        export.main([str(tmp_path / "out"), "--run-dir", str(run_dir), "--step", "1"])
    assert pruned.value.code == 1
    args = [str(tmp_path / "out"), "--run-dir", str(run_dir), "--step", "1", "--nats-url", nats_config.url]
    await anyio.to_thread.run_sync(export.main, args)
    assert (tmp_path / "out" / "adapter_model.safetensors").stat().st_size > 0


@pytest.mark.parametrize("step", ["0", "newest", "-1", "²", "1" * 5000], ids=lambda step: step[:8])
def test_an_invalid_step_and_a_folder_that_exists_are_usage_errors(tmp_path: Path, step: str) -> None:
    configuration.save(kit.settings("base", tmp_path), tmp_path / "config.toml")
    run_dir = ["--run-dir", str(tmp_path)]
    for arguments in ([str(tmp_path / "out"), f"--step={step}"], [str(tmp_path)]):
        with pytest.raises(SystemExit) as error:
            export.main([*arguments, *run_dir])
        assert error.value.code == 2


async def test_a_model_that_sees_images_is_merged_whole(tmp_path: Path) -> None:
    """It was loaded by the class for text alone, whose names the adapter's did not match."""
    base = make_vision_model(tmp_path / "base", "qwen3_vl")
    loaded = loading.load(base, TrainerConfig(lora=LoraConfig(rank=4)), torch.device("cpu")).model
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in loaded.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    loaded.save_pretrained(tmp_path / "adapter")
    files = {name: (tmp_path / "adapter" / name).read_bytes() for name in checkpoint.ADAPTER_FILES}
    (tmp_path / "merged").mkdir()
    export.write_merged(files, base, tmp_path / "merged")
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    ids = torch.arange(10, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=ids).logits, loaded(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    weights = "adapter_model.safetensors"
    other = files | {weights: files[weights].replace(b"q_proj", b"x_proj")}
    with pytest.raises(checkpoint.CheckpointError, match="does not fit"):
        export.write_merged(other, base, tmp_path / "other")
