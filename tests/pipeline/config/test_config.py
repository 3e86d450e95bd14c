"""Settings: an error names the setting that is wrong."""

import json
import math
import re
import typing
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config, ConfigError, KeyConfig, ModelConfig, load, save
from pipeline.config.checks import check
from pipeline.config.overrides import tables
from tests.kits.settings import with_values


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("gateway.max_reward=nan", "gateway.max_reward: expected a finite number, got nan"),
        ("gateway.http.max_connections=0", "settings: gateway.http.max_connections: expected `int` >= 1"),
        (
            'trainer.distill={weight=1.0, teacher="outside"}',
            'trainer.distill.teacher is "outside": set teacher.url and teacher.model',
        ),
        ("teacher.url=http://teacher/v1", "teacher: url and model belong together"),
        ("vllm.max_loras=1", "vllm.max_loras is 1: it must be larger than the number of models"),
        ("vllm.max_loras=2", "vllm.max_loras is 2: it must be at least trainer.max_staleness + 2"),
        (
            "trainer.lora.rank=64",
            "trainer.lora.rank is 64, above vllm.max_lora_rank = 8: vLLM would refuse the adapter",
        ),
        ("trainer.lora.rank=1024", "vLLM serves adapters up to rank 512"),
        ("vllm.max_lora_rank=24", "vllm.max_lora_rank is 24: vLLM takes 1, 8, 16, 32, 64, 128, 256, 320, 512"),
        (
            "log_level=LOUD",
            "settings: log_level: invalid enum value 'LOUD', expected DEBUG or INFO or WARNING or ERROR or CRITICAL",
        ),
        ("nats.sync=never", "settings: nats.sync: invalid enum value 'never', expected always or float"),
        ("judge.anchors=x.jsonl", "settings: judge.anchors: expected table, got text"),
        (
            "models.0.trainer.optimizer.learning_rate=-1",
            "models: trainer of policy: settings: trainer.optimizer.learning_rate: expected",
        ),
        ("models.0.trainer.memory.sharded=true", "trainer.memory.sharded: set trainer.processes"),
        ("models.0.trainer.branch=x", "trainer of policy: `branch` is shared by all models: set trainer.branch"),
        (
            "models.0.trainer.processes=2",
            "trainer of policy: `processes` is shared by all models: set trainer.processes",
        ),
        ("trainer.optimizer.betas=[0.9, 1.0]", "settings: trainer.optimizer.betas.1: expected `float` < 1.0"),
        ("trainer.optimizer.schedule=linear", "trainer.optimizer.schedule: `linear` falls to 0 at trainer.max_steps"),
        ("trainer.branch=../x", "trainer.branch: '../x' can't be a name"),
        ("project=", "project: '' can't be a name"),
        ("models.0.name=a/../b", "models.0.name: 'a/../b' can't be a name"),
        (
            'models=[{name="m+b", base="b"}, {name="m", base="b"}]',
            "models.0.name: 'm+b' is also the name of branch 'b' of the model 'm'",
        ),
        ("models.3.name=m", "models.3.name: '3' is no place in this list: write a number from 0 to 0"),
        ("trainer.seed=" + "1" * 5000, "trainer.seed: Exceeds the limit"),
        ("trainer.seed=1\nzz=3", "trainer.seed: more than one setting: an unquoted value has one line"),
        ("trainer.seed.x.y=1", "settings: trainer.seed: expected `int`, got table"),
        ("trainer.sede=1", "there is no such setting; did you mean trainer.seed? `journeywork docs FOLDER` writes"),
        ("gatway.port=1", "settings: gatway: there is no such setting; did you mean gateway?"),
        ("port=1", "port: there is no such setting; did you mean ui.port or vllm.port or nats.port or gateway.port?"),
        ("trainer.learning_rate=1", "did you mean trainer.optimizer.learning_rate?"),
        ("models.0.trainer.learning_rate=1", "did you mean trainer.optimizer.learning_rate?"),
        ("base=/m", "did you mean models.0.base?"),
        ("qwertz=1", "settings: qwertz: there is no such setting. `journeywork docs FOLDER` writes"),
        ("=3", "'=3' is not a setting: write section.key=value"),
        ("vllm..env.A=3", "'vllm..env.A=3' is not a setting: write section.key=value"),
        ('vllm."env.A=3', "there is no such setting"),
        ('models={name="x"}', "settings: models: expected list, got table"),
        ("vllm.args=3", "settings: vllm.args: expected list, got `int`"),
        ("vllm.env=3", "settings: vllm.env: expected table, got `int`"),
        ('vllm.env={"A": 1}', "settings: vllm.env.<name>: expected text, got `int`"),
    ],
)
def test_a_value_that_is_not_allowed_is_one_line_with_the_setting_and_what_is_allowed(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [override])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_wrong_in_a_file_is_told_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[[models]]\nbase = 'b'\n[[models]]\nbse = 'b'\n")
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert str(caught.value) == (
        f"{file}: settings: models.1.bse: there is no such setting; did you mean models.1.base? `journeywork docs "
        "FOLDER` writes a page of all settings"
    )
    file.write_text("[gateway]\nport = 'x'\n")
    with pytest.raises(ConfigError) as caught:
        load(file, ["gateway.port=1"])
    assert str(caught.value) == f"{file}: settings: gateway.port: expected `int`, got text"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("gateway.port", 70_000, "GatewayConfig.port: expected `int` <= 65535"),
        ("gateway.http.max_body_bytes", 0, "HttpConfig.max_body_bytes: expected `int` >= "),
        ("gateway.keys", (KeyConfig(sha256="x", calls_per_minute=-1),), "keys.0.calls_per_minute: expected `int` >= 0"),
        ("vllm.urls", "http://a", "VllmConfig.urls: expected list, got text"),
        ("judge.timeout_s", math.inf, "JudgeConfig.timeout_s: expected a finite number"),
        ("vllm", {"env": {1: "x"}}, "settings: Config.vllm.env.<name>: expected text, got `int`"),
    ],
)
def test_a_value_set_in_code_is_checked_as_one_of_a_file(name: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_values(Config(), {name: value})
    assert said in str(caught.value)


def test_every_number_of_the_settings_is_bounded() -> None:
    """A size, time or count that may be anything is a check that was forgotten."""
    for _, cls in tables(Config):
        for name, hint in typing.get_type_hints(cls, include_extras=True).items():
            if re.search(r"\b(int|float)\b", str(hint)):
                assert "Meta" in str(hint), f"{cls.__name__}.{name}"


@pytest.mark.parametrize(
    ("override", "env"),
    [
        ("vllm.env.OMP_NUM_THREADS=1", {"OMP_NUM_THREADS": "1"}),
        ('vllm.env.QUOTED="1"', {"QUOTED": "1"}),
        ('vllm.env={"A": "b"}', {"A": "b"}),
        ('vllm.env."A.B"=1', {"A.B": "1"}),
        ('vllm.env."A=B"="c=d"', {"A=B": "c=d"}),
        ("vllm.env.A=b\nc=3", {"A": "b\nc=3"}),
        ("vllm.env.A='''1\nc=3'''", {"A": "1\nc=3"}),
        ('vllm.env={A = \'b\', B = """\nc"""}', {"A": "b", "B": "c"}),
    ],
)
def test_a_text_stays_one_where_the_setting_is_a_text(override: str, env: dict[str, str]) -> None:
    assert load(None, [override]).vllm.env == env


def test_a_name_of_digits_is_a_name_and_any_value_is_read_as_toml() -> None:
    config = load(None, ["models.0.name=7", "judge.request.params.seed=3", "nats.url=nats://a:1", "nats.sync=2"])
    assert (config.models[0].name, config.judge.request.params, config.nats.sync) == ("7", {"seed": 3}, 2.0)
    assert load(None, ['nats.url=["nats://a:1", "nats://b:1"]']).nats.servers == ("nats://a:1", "nats://b:1")


def test_a_number_is_a_name_in_a_table_and_a_place_in_a_list(tmp_path: Path) -> None:
    bias = "judge.request.params.logit_bias."
    config = load(None, [f'{bias}"0"=1', f"{bias}2=3", "judge.request.params.50256.0=-100"])
    assert config.judge.request.params == {"logit_bias": {"0": 1, "2": 3}, "50256": {"0": -100}}
    assert load(None, ["vllm.args.0=--seed", "vllm.args.1=3"]).vllm.args == ("--seed", "3")
    file = tmp_path / "j.toml"
    file.write_text('[[models]]\nname = "m"\nbase = "b"\n')
    with pytest.raises(ConfigError, match=r"models\.-1\.name: '-1' is no place .* from 0 to 1$"):
        load(file, ["models.-1.name=n"])


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no settings file"):
        load(tmp_path / "nothing.toml")
    (tmp_path / "broken.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match="can't be read"):
        load(tmp_path)
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


def test_a_judge_does_not_wait_longer_than_the_log_keeps_runs() -> None:
    with pytest.raises(ConfigError, match=r"judge\.timeout_s: a group may wait at most half"):
        check(with_values(Config(), {"nats.rollouts_max_age_h": 0.25, "judge.timeout_s": 600}))
    waiting = {"nats.rollouts_max_age_h": 24.0, "judge.timeout_s": 600, "feedback.wait_s": 86_400 - 1200}
    check(with_values(Config(), waiting))
    with pytest.raises(ConfigError, match=r"feedback\.wait_s is 86400: it may be at most 85200 s"):
        check(with_values(Config(), waiting | {"feedback.wait_s": 86_400}))
    with pytest.raises(ConfigError, match=r"nats\.publish_deadline_s must be less than 120"):
        check(with_values(Config(), {"nats.publish_deadline_s": 120}))


def test_a_larger_staleness_alone_is_enough() -> None:
    """The fault that was: `vllm.max_loras` had to be raised with `trainer.max_staleness`."""
    base = ["models.0.base=b"]
    assert load(None, base).max_loras() == 4
    assert load(None, [*base, "trainer.max_staleness=4"]).max_loras() == 6
    assert load(None, [*base, "trainer.max_staleness=4", "vllm.max_loras=9"]).max_loras() == 9
    models = json.dumps([{"name": f"m{number}", "base": "b"} for number in range(7)])
    assert load(None, [f"models={models}"]).max_loras() == 8
