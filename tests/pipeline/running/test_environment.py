"""The environment variables that each process gets."""

import pytest

from pipeline.config import PROCESSES, load
from pipeline.running import environment

SECRETS = {
    "OPENAI_API_KEY",
    "ANTHROPIC_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "HF_TOKEN",
    "LANGFUSE_SECRET_KEY",
    "GATEWAY_SECRET",
    "GITHUB_TOKEN",
    "OTEL_EXPORTER_OTLP_HEADERS",
    "https_proxy",
    "VLLM_API_KEY",
    "GEMINI_API_KEY",
    "TOGETHERAI_API_KEY",
    "FIREWORKS_API_KEY",
    "PERPLEXITYAI_API_KEY",
}


def seen(process: str, *settings: str) -> set[str]:
    given = dict.fromkeys((*SECRETS, "PATH", "HOME", "LC_ALL", "PYTHONPATH"), "x")
    return set(environment.environment_of(load(None, settings), process, given))


@pytest.mark.parametrize(
    ("process", "secrets"),
    [
        ("nats", set()),
        ("gateway", set()),
        ("vllm", {"HF_TOKEN", "VLLM_API_KEY", "https_proxy"}),
        ("judge", {"https_proxy"}),
        ("trainer", {"HF_TOKEN", "https_proxy"}),
        ("store", {"AWS_SECRET_ACCESS_KEY", "https_proxy"}),
        ("ui", {"AWS_SECRET_ACCESS_KEY", "https_proxy"}),
        ("telemetry", {"LANGFUSE_SECRET_KEY", "OTEL_EXPORTER_OTLP_HEADERS", "https_proxy"}),
    ],
)
def test_each_process_sees_its_own_secrets_only(process: str, secrets: set[str]) -> None:
    assert seen(process) & SECRETS == secrets
    assert seen(process) >= {"PATH", "HOME", "LC_ALL", "PYTHONPATH"}


def test_every_process_is_in_the_table() -> None:
    assert set(environment.NEEDS) == set(PROCESSES)


@pytest.mark.parametrize(
    ("process", "settings", "more"),
    [
        ("judge", ["judge.api_key_env=GITHUB_TOKEN"], {"GITHUB_TOKEN"}),
        ("judge", ["teacher.api_key_env=GITHUB_TOKEN"], {"GITHUB_TOKEN"}),
        ("judge", ['judge.request.params={headers={x="Bearer ${GITHUB_TOKEN}"}}'], {"GITHUB_TOKEN"}),
        ("judge", ["judge.model=openai/gpt-5-mini"], {"OPENAI_API_KEY"}),
        ("judge", ["judge.model=gpt-5-mini"], {"OPENAI_API_KEY"}),
        ("judge", ["judge.model=claude-x"], {"ANTHROPIC_API_KEY"}),
        ("judge", ["judge.model=gemini/g"], {"GEMINI_API_KEY"}),
        ("judge", ["judge.model=bedrock/x"], {"AWS_SECRET_ACCESS_KEY"}),
        ("judge", ["judge.model=together_ai/x"], {"TOGETHERAI_API_KEY"}),
        ("judge", ["judge.model=fireworks_ai/x"], {"FIREWORKS_API_KEY"}),
        ("judge", ["judge.model=perplexity/x"], {"PERPLEXITYAI_API_KEY"}),
        ("gateway", ["gateway.key_secret_env=GATEWAY_SECRET"], {"GATEWAY_SECRET"}),
        ("nats", ['environment.nats=["GITHUB_*"]'], {"GITHUB_TOKEN"}),
    ],
)
def test_settings_name_more(process: str, settings: list[str], more: set[str]) -> None:
    assert seen(process, *settings) - seen(process) == more
