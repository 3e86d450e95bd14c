"""`journeywork export` writes folders that other programs load."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from journeywork.statistics import Sample
from pipeline import config as configuration
from pipeline.config import LoraConfig, NatsConfig, TrainerConfig
from pipeline.log.broker import Broker
from pipeline.versions.lake_files import checkpoint_folder
from store.lake.lake import open_lake
from store.lake.versions import copy_version
from tests.conftest import VllmServer
from tests.kits.vision import make_vision_model
from tests.trainer import kit
from tests.trainer.engine.test_vllm import post
from tests.trainer.kit import running, steps_reach
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.commands import export
from trainer.engine import loading


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
    checkpoints.set_best(checkpoint.Best(3, Sample.of([0.5] * 4)))
    export.main([str(tmp_path / "out"), "--run-dir", str(run_dir), "--step", "best"])
    assert {p.name for p in (tmp_path / "out").iterdir()} == set(checkpoint.ADAPTER_FILES)


async def test_a_pruned_step_comes_from_the_lake(
    run_dir: Path, broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [str(tmp_path / "out"), "--run-dir", str(run_dir), "--step", "1"]
    with pytest.raises(SystemExit) as pruned:
        export.main(args)
    assert pruned.value.code == 1
    assert "step 1 of tiny is neither on disk nor in the lake" in capsys.readouterr().err
    config = configuration.load(run_dir / "config.toml")
    (first, *_) = await kit.checkpoints(broker)
    await copy_version(broker, open_lake(config).storage, "adapters", first)
    export.main(args)
    assert (tmp_path / "out" / "adapter_model.safetensors").stat().st_size > 0
    # Whoever can write to the lake must not give one version another's name.
    lake = config.path(config.store.dir)
    own, other = (lake / checkpoint_folder(config.project, "main", kit.MODEL, step) for step in (1, 2))
    shutil.copytree(own, other)
    with pytest.raises(SystemExit):
        export.main([str(tmp_path / "other"), "--run-dir", str(run_dir), "--step", "2"])
    assert "holds tiny@1 of branch main" in capsys.readouterr().err


@pytest.mark.parametrize("step", ["0", "newest", "-1", "²", "1" * 5000], ids=lambda step: step[:8])
def test_an_invalid_step_and_a_folder_that_exists_are_usage_errors(tmp_path: Path, step: str) -> None:
    configuration.save(kit.settings("base", tmp_path), tmp_path / "config.toml")
    run_dir = ["--run-dir", str(tmp_path)]
    for arguments in ([str(tmp_path / "out"), f"--step={step}"], [str(tmp_path)]):
        with pytest.raises(SystemExit) as error:
            export.main([*arguments, *run_dir])
        assert error.value.code == 2


def random_adapter(base: str, folder: Path, rank: int = 4) -> tuple[torch.nn.Module, dict[str, bytes]]:
    """A model whose adapter is not zero, and the adapter's files, which are written into `folder` too."""
    loaded = loading.load(base, TrainerConfig(lora=LoraConfig(rank=rank)), torch.device("cpu")).model
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in loaded.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    loaded.save_pretrained(folder)
    return loaded, {name: (folder / name).read_bytes() for name in checkpoint.ADAPTER_FILES}


@pytest.mark.parametrize("on_the_hub", [False, True])
def test_a_merged_model_has_the_tokenizer_of_its_base_and_no_weights_of_it(
    tiny_base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_the_hub: bool
) -> None:
    """The index of the base's files was copied, after which vLLM found no weights in the merged one."""
    base, merged = tmp_path / "base", tmp_path / "merged"
    AutoModelForCausalLM.from_pretrained(tiny_base).save_pretrained(base, max_shard_size="50KB")
    assert (base / "model.safetensors.index.json").exists()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"):
        (base / name).write_text("{}")
    shutil.copy(base / "config.json", base / "pytorch_model.bin")
    files, name = random_adapter(str(base), tmp_path / "adapter")[1], str(base)
    if on_the_hub:
        name = "someone/base"
        monkeypatch.setattr(loading, "auto_class", lambda _: _FromTheHub(base))
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda _, ignore_patterns: str(base))
    merged.mkdir()
    export.write_merged(files, name, merged)
    assert {file.name for file in merged.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"),
    }


class _FromTheHub:
    """Stands for a class of transformers that loads a model by its name on the hub."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def from_pretrained(self, name: str) -> torch.nn.Module:
        assert name == "someone/base"
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(self.folder)
        return model


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_answers_with_merged_weights_as_with_the_adapter(vllm_server: VllmServer, tmp_path: Path) -> None:
    base, merged = str(vllm_server.base), tmp_path / "merged"
    files = random_adapter(base, tmp_path / "adapter", rank=8)[1]
    merged.mkdir()
    export.write_merged(files, base, merged)
    prompts = [[7, 5, 9, 11], list(range(2, 30)), [3] * 12]

    def greedy(server: VllmServer, model: str) -> list[list[int]]:
        body = {"model": model, "prompt": prompts, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = json.loads(post(server, "/v1/completions", body | {"return_token_ids": True}))
        return [choice["token_ids"] for choice in answer["choices"]]

    post(vllm_server, "/v1/load_lora_adapter", {"lora_name": "exported", "lora_path": str(tmp_path / "adapter")})
    try:
        adapted = greedy(vllm_server, "exported")
    finally:
        post(vllm_server, "/v1/unload_lora_adapter", {"lora_name": "exported"})
    assert adapted != greedy(vllm_server, f"{vllm_server.model}@0")
    server = VllmServer(tmp_path)
    server.base, server.model = merged, "merged"
    server.start()
    try:
        assert greedy(server, "merged@0") == adapted
    finally:
        server.kill()
    model = AutoModelForCausalLM.from_pretrained(merged)
    for prompt, expected in zip(prompts, adapted, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + expected])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == expected


async def test_a_model_that_sees_images_is_merged_whole(tmp_path: Path) -> None:
    """It was loaded by the class for text alone, whose names the adapter's did not match."""
    base = make_vision_model(tmp_path / "base", "qwen3_vl")
    loaded, files = random_adapter(base, tmp_path / "adapter")
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
