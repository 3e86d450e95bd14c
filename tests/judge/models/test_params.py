"""`judge.request.params`: any parameter of litellm, with secrets from the environment only."""

from pathlib import Path
from typing import Any

import pytest

from judge.models.params import resolve_params
from judge.scoring import judge_hash
from pipeline.config import ConfigError, JudgeConfig, JudgeRequestConfig, load
from tests.kits.settings import with_values


def test_references_are_replaced_by_values_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENANT", "t-1")
    monkeypatch.setenv("TOKEN", "s3cret")
    params = {
        "tenant_id": "${TENANT}",
        "reasoning_effort": "low",
        "extra_headers": {"Authorization": "Bearer ${TOKEN}"},
        "top_k": 3,
        "tags": ["${TENANT}", "$TENANT"],
    }
    config = JudgeConfig(model="azure/x", request=JudgeRequestConfig(params=params))
    assert resolve_params(config) == {
        "tenant_id": "t-1",
        "reasoning_effort": "low",
        "extra_headers": {"Authorization": "Bearer s3cret"},
        "top_k": 3,
        "tags": ["t-1", "$TENANT"],
    }


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"request.params": {"stream": True}}, r"judge\.request\.params\.stream: the judge sets this parameter itself"),
        (
            {"request.params": {"api_key": "${NO_SUCH_VARIABLE}"}},
            r"judge\.request\.params\.api_key: the environment has no NO_SUCH_VARIABLE",
        ),
    ],
)
def test_a_parameter_that_can_t_be_used_is_named(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve_params(with_values(JudgeConfig(model="m/x"), fields))


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ('params = {api_key = "sk-1"}', "judge.request.params.api_key"),
        ('params = {extra_headers = {Authorization = "Bearer x"}}', "judge.request.params.extra_headers.Authorization"),
        ('params = {extra_headers = {"X-Api-Key" = "x"}}', "judge.request.params.extra_headers.X-Api-Key"),
        ('params = {client_secret = "x"}', "judge.request.params.client_secret"),
        ('params = {list = [{azure_ad_token = "x"}]}', "judge.request.params.list.azure_ad_token"),
        ("params = {vertex_credentials = '{\"private_key\": 1}'}", "judge.request.params.vertex_credentials"),
        ('params = {aws_secret_access_key = "x"}', "judge.request.params.aws_secret_access_key"),
    ],
)
def test_a_secret_in_the_settings_is_refused_before_they_are_saved(tmp_path: Path, table: str, name: str) -> None:
    (tmp_path / "x.toml").write_text(f"[judge.request]\n{table}\n")
    with pytest.raises(ConfigError, match="a secret does not belong in the settings") as refused:
        load(tmp_path / "x.toml")
    assert str(refused.value).startswith(name)


def test_the_judge_s_hash_depends_only_on_settings_that_can_change_scores(tmp_path: Path) -> None:
    def named(**fields: Any) -> str:
        return judge_hash(with_values(JudgeConfig(model="m/x"), fields))

    plain = named()
    assert named(**{"request.params": {"reasoning_effort": "high"}}) != plain
    same = {"extra_headers": {"a": "b"}, "tenant_id": "t", "client_secret": "${X}", "timeout": 3, "api_version": "1"}
    assert named(**{"request.params": same}) == plain
    assert named(**{"request.max_tokens": 100}) == plain
