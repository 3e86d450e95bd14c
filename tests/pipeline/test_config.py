"""Settings: what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import Config, ConfigError, ModelConfig, load, save


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("trainer.learning_rat=1", "learning_rat"),
        ("trainer.learning_rate=fast", "learning_rate"),
        ("nonsense", "section.key=value"),
        ("judge.min_size=1", "min_size"),
        ("vllm.max_loras=1", "max_loras"),
        ("trainer.lora_rank=64", "max_lora_rank"),
        ("models.0.name=a@b", "@"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(None, [override])


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no settings file"):
        load(tmp_path / "nothing.toml")
    (tmp_path / "broken.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match="not TOML"):
        load(tmp_path / "broken.toml")


def test_flags_win_over_the_file_and_a_saved_run_loads_again(tmp_path: Path) -> None:
    file = tmp_path / "j.toml"
    file.write_text('project = "x"\n[[models]]\nname = "m"\nbase = "b"\n[trainer]\nseed = 3\n')
    config = load(file, ["trainer.seed=4", 'vllm.args=["--seed", "1"]', "models.1.name=n", "models.1.base=b"])
    assert (config.project, config.trainer.seed, config.vllm.args) == ("x", 4, ("--seed", "1"))
    assert config.models == (ModelConfig(name="m", base="b"), ModelConfig(name="n", base="b"))
    save(config, tmp_path / "run" / "config.toml")
    assert load(tmp_path / "run" / "config.toml") == config
    assert load() == Config()
