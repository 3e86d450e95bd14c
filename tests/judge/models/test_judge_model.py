"""Calls of the judge model over HTTP to the scoring server."""

import os
import subprocess
import sys
from typing import Any

import anyio
import pytest

from judge.models.chat import ContextWindowError, ModelError
from judge.models.judge_model import open_judge_model
from judge.models.litellm_client import describe
from pipeline.config import ConfigError, JudgeConfig
from tests.judge.kit import IMPORTS_LITELLM
from tests.kits.scoring_server import Answer, ScoringServer
from tests.kits.settings import with_values

pytestmark = IMPORTS_LITELLM

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
HELLO = [{"role": "user", "content": "hello"}]


def settings(server: ScoringServer, **fields: Any) -> JudgeConfig:
    return with_values(JudgeConfig(model="openai/scorer", api_base=server.url), {"request.retries": 0, **fields})


@pytest.mark.slow
async def test_a_reply_comes_with_its_tokens_cost_and_latency() -> None:
    async with ScoringServer(lambda _: "fine", keep=True).run() as server:
        reply = await (await open_judge_model(settings(server, **{"request.temperature": 0.0})))(HELLO, SCHEMA)
        assert (reply.text, reply.model, reply.prompt_tokens, reply.completion_tokens) == ("fine", "scorer", 1, 1)
        assert reply.latency_s > 0
        (request,) = server.requests
        assert (request["messages"], request["response_format"], request["temperature"]) == (HELLO, SCHEMA, 0.0)


@pytest.mark.parametrize("status", [400, 422])
async def test_a_provider_that_rejects_the_schema_is_called_without_it(status: int) -> None:
    def refuse(request: dict[str, Any]) -> Answer:
        return status if "response_format" in request else "fine"

    async with ScoringServer(refuse, refusal="response_format is not supported", keep=True).run() as server:
        model = await open_judge_model(settings(server))
        assert (await model(HELLO, SCHEMA)).text == "fine"
        assert (await model(HELLO, SCHEMA)).text == "fine"
        assert ["response_format" in r for r in server.requests] == [True, False, False]


async def test_a_failing_provider_is_retried_and_then_an_error() -> None:
    answers = iter([503, "fine", 500, 500])
    async with ScoringServer(lambda _: next(answers)).run() as server:
        model = await open_judge_model(settings(server, **{"request.retries": 1}))
        assert (await model(HELLO, None)).text == "fine"
        with pytest.raises(ModelError, match="InternalServerError"):
            await model(HELLO, None)
        assert server.calls == 4


async def test_max_tokens_and_other_parameters_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM", "t-1")
    headers = {"x-team": "${TEAM}", "authorization": "Bearer ${TEAM}"}
    params = {"seed": 3, "extra_headers": headers, "extra_body": {"chat_template_kwargs": {"a": 1}}}
    async with ScoringServer(lambda _: "fine", keep=True).run() as server:
        for request in ({}, {"params": params, "max_tokens": 0}, {"params": {"max_tokens": 7}}):
            fields = {f"request.{name}": value for name, value in request.items()}
            await (await open_judge_model(settings(server, **fields)))(HELLO, None)
        usual, own, less = server.requests
        assert (usual["max_tokens"], less["max_tokens"]) == (8192, 7)
        assert (own["seed"], own["chat_template_kwargs"], "max_tokens" in own) == (3, {"a": 1}, False)
        assert [h.get("x-team") for h in server.headers] == [None, "t-1", None]
        assert [h["authorization"] for h in server.headers] == ["Bearer none", "Bearer t-1", "Bearer none"]


async def test_a_prompt_that_is_too_long_is_an_error_of_its_own() -> None:
    refusal = "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens."
    async with ScoringServer(lambda _: 400, refusal=refusal).run() as server:
        with pytest.raises(ContextWindowError, match="maximum context length"):
            await (await open_judge_model(settings(server, **{"request.max_tokens": 100})))(HELLO, SCHEMA)


async def test_a_small_context_is_not_used_up_by_the_tokens_of_the_reply() -> None:
    """A judge model with 4,096 tokens refuses every prompt that comes with `max_tokens` of 8,192."""

    def answer(request: dict[str, Any]) -> Answer:
        prompt = sum(len(m["content"]) for m in request["messages"]) // 3
        return 400 if prompt + request["max_tokens"] > 4096 else "fine"

    refusal = "This model's maximum context length is 4096 tokens."
    async with ScoringServer(answer, refusal=refusal, keep=True).run() as server:
        model = await open_judge_model(settings(server))
        assert (await model(HELLO, SCHEMA)).text == "fine"
        assert (await model(HELLO, SCHEMA)).text == "fine"
        assert [r["max_tokens"] for r in server.requests] == [8192, 4096, 2048, 2048]
        several = await open_judge_model(settings(server))
        async with anyio.create_task_group() as tg:
            for _ in range(4):
                tg.start_soon(several, HELLO, SCHEMA)
        assert server.requests[-1]["max_tokens"] == 2048  # however many calls learned it at once
        with pytest.raises(ContextWindowError):  # this prompt is what is too long
            await model([{"role": "user", "content": "x" * 20_000}], SCHEMA)
        assert server.requests[-1]["max_tokens"] == 2048
        with pytest.raises(ContextWindowError):
            await (await open_judge_model(settings(server, **{"request.params": {"max_tokens": 5000}})))(HELLO, SCHEMA)


async def test_a_call_that_exceeds_its_timeout_is_an_error() -> None:
    async with ScoringServer(delay_s=30).run() as server:
        with pytest.raises(ModelError, match="Timeout"):
            await (await open_judge_model(settings(server, **{"request.timeout_s": 0.3})))(HELLO, None)


@pytest.mark.parametrize(
    ("model", "variable"),
    [
        ("openai/gpt-5-mini", "OPENAI_API_KEY"),
        ("claude-sonnet-4-5", "ANTHROPIC_API_KEY"),
        ("gemini/gemini-2.5-pro", "GEMINI_API_KEY"),
    ],
)
async def test_a_provider_s_missing_key_is_told_before_the_first_call(
    model: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was litellm's message in the judge's log, once per group."""
    for name in [n for n in os.environ if n.startswith(("OPENAI_", "ANTHROPIC_", "GEMINI_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=rf"judge.model: {model} .*{variable} .* judge.api_key_env"):
        await open_judge_model(JudgeConfig(model=model))
    await open_judge_model(JudgeConfig(model=model, api_base="http://127.0.0.1:1"))  # it may need none
    await open_judge_model(with_values(JudgeConfig(model=model), {"request.params": {"api_key": "${HOME}"}}))
    monkeypatch.setenv(variable, "k")
    await open_judge_model(JudgeConfig(model=model))


@pytest.mark.parametrize("address", ["api_base", "base_url"])
async def test_a_server_that_parameters_name_is_called_without_a_key(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`base_url` was refused for want of a key, and with `api_base` OpenAI's client refused each call."""
    for name in [n for n in os.environ if n.startswith("OPENAI_")]:
        monkeypatch.delenv(name)
    async with ScoringServer(lambda _: "fine", keep=True).run() as server:
        fields = {"request.retries": 0, "request.params": {address: server.url}}
        config = with_values(JudgeConfig(model="openai/scorer"), fields)
        assert (await (await open_judge_model(config))(HELLO, None)).text == "fine"
        monkeypatch.setenv("OPENAI_API_KEY", "k-1")
        assert (await (await open_judge_model(config))(HELLO, None)).text == "fine"
    assert [headers["authorization"] for headers in server.headers] == ["Bearer none", "Bearer k-1"]


async def test_concurrent_calls_are_limited() -> None:
    def answer(request: dict[str, Any]) -> Answer:
        return str(request["messages"][0]["content"])

    async with ScoringServer(answer, delay_s=0.02).run() as server:
        model = await open_judge_model(settings(server, concurrency=3))
        found: dict[str, str] = {}

        async def one(text: str) -> None:
            found[text] = (await model([{"role": "user", "content": text}], None)).text

        async with anyio.create_task_group() as tg:
            for text in [*map(str, range(30)), "äö" * 200_000]:
                tg.start_soon(one, text)
        assert all(text == reply for text, reply in found.items())
        assert len(found) == 31
        assert 1 < server.most <= 3


def test_without_a_judge_model_litellm_is_not_imported() -> None:
    code = "import judge.service, judge.rewards.compose, judge.models.judge_model, sys; print('litellm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("temperature: must be at most 2", True),
        ("can't decode 'Müller, Bahnhofstraße 1'", False),
        ("can't decode {'text': 'M\\u00fcller, Bahnhofstra\\u00dfe 1'}", False),
        ('bad: "I live at\\nM\u00fcller, Bahn"', False),
    ],
)
def test_an_error_is_told_unless_it_repeats_the_prompt(said: str, told: bool) -> None:
    sent = [{"role": "user", "content": [{"type": "text", "text": "I live at\nMüller, Bahnhofstraße 1"}]}]
    assert describe(ValueError(said), sent) == (
        f"ValueError: {said}" if told else "ValueError: its message repeats the text that it was sent"
    )
