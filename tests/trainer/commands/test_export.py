"""`journeywork export` writes folders that other programs load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from pipeline import config as configuration
from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from tests.trainer import kit
from tests.trainer.kit import running, steps_reach
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.commands import export

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
    run_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as none:
        export.main([str(tmp_path / "out"), "--run-dir", str(run_dir), "--step", "best"])
    assert none.value.code == 1
    Checkpoints(run_dir / "checkpoints" / "p" / "main" / kit.MODEL).set_best(checkpoint.Best(3, 0.5, 4))
    export.main([str(tmp_path / "out"), "--run-dir", str(run_dir), "--step", "best"])
    assert {p.name for p in (tmp_path / "out").iterdir()} == set(checkpoint.ADAPTER_FILES)


async def test_a_pruned_step_comes_from_the_log(
    run_dir: Path, nats_config: NatsConfig, tmp_path: Path
) -> None:
    import anyio.to_thread

    with pytest.raises(SystemExit) as pruned:
        export.main([str(tmp_path / "out"), "--run-dir", str(run_dir), "--step", "1"])
    assert pruned.value.code == 1
    args = [str(tmp_path / "out"), "--run-dir", str(run_dir), "--step", "1", "--nats-url", nats_config.url]
    await anyio.to_thread.run_sync(export.main, args)
    assert (tmp_path / "out" / "adapter_model.safetensors").stat().st_size > 0


@pytest.mark.parametrize("step", ["0", "newest", "-1", "²", "1" * 5000], ids=lambda step: step[:8])
async def test_an_invalid_step_is_a_usage_error(run_dir: Path, tmp_path: Path, step: str) -> None:
    with pytest.raises(SystemExit) as error:
        export.main([str(tmp_path / "out"), "--run-dir", str(run_dir), f"--step={step}"])
    assert error.value.code == 2


async def test_nothing_is_overwritten(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        export.main([str(tmp_path), "--run-dir", str(run_dir)])
    assert error.value.code == 2
