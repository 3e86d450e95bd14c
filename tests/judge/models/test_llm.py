"""The judge through litellm's router, against the scoring server over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import msgspec
import pytest

from judge.models.callers import open_complete
from judge.models.llm import ContextWindowError, ModelError, Router
from pipeline.config import ConfigError, JudgeConfig
from tests.kits.scoring_server import Answer, Scorer, ScoringServer

pytestmark = [
    pytest.mark.anyio,
    # litellm's and its dependencies' own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Pydantic.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
HELLO = [{"role": "user", "content": "hello"}]


def settings(server: ScoringServer, **fields: Any) -> JudgeConfig:
    return JudgeConfig(model="openai/scorer", api_base=server.url, **{"retries": 0, **fields})


@pytest.fixture
async def routers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Closes every router that a test made."""
    made: list[Router] = []
    original = Router.__init__

    def remember(self: Router, *args: Any) -> None:
        original(self, *args)
        made.append(self)

    monkeypatch.setattr(Router, "__init__", remember)
    yield
    for router in made:
        await router.aclose()


@pytest.mark.usefixtures("routers")
async def test_a_reply_comes_with_what_it_took() -> None:
    async with ScoringServer(lambda _: "fine", keep=True).run() as server:
        reply = await (await Router.make(settings(server, temperature=0.0)))(HELLO, SCHEMA)
        assert (reply.text, reply.model, reply.prompt_tokens, reply.completion_tokens) == (
            "fine",
            "scorer",
            1,
            1,
        )
        assert reply.latency_s > 0
        (request,) = server.requests
        assert (request["messages"], request["response_format"], request["temperature"]) == (
            HELLO,
            SCHEMA,
            0.0,
        )


@pytest.mark.usefixtures("routers")
async def test_a_provider_that_refuses_the_schema_is_asked_without() -> None:
    def refuse(request: dict[str, Any]) -> Answer:
        return 400 if "response_format" in request else "fine"

    async with ScoringServer(refuse, refusal="response_format is not supported", keep=True).run() as server:
        router = await Router.make(settings(server))
        assert (await router(HELLO, SCHEMA)).text == "fine"
        assert (await router(HELLO, SCHEMA)).text == "fine"
        assert ["response_format" in r for r in server.requests] == [True, False, False]


@pytest.mark.usefixtures("routers")
async def test_a_failing_provider_is_tried_again_then_an_error() -> None:
    answers = iter([500, 503, "fine", 500, 500, 500])
    async with ScoringServer(lambda _: next(answers)).run() as server:
        router = await Router.make(settings(server, retries=2))
        assert (await router(HELLO, None)).text == "fine"
        with pytest.raises(ModelError, match="InternalServerError"):
            await router(HELLO, None)
        assert server.calls == 6


@pytest.mark.usefixtures("routers")
async def test_a_fallback_answers_for_a_model_that_fails() -> None:
    def answer(request: dict[str, Any]) -> Answer:
        return 500 if request["model"] == "scorer" else "fine"

    async with ScoringServer(answer).run() as server:
        router = await Router.make(settings(server, fallbacks=("openai/other",)))
        assert (await router(HELLO, None)).model == "other"


@pytest.mark.usefixtures("routers")
async def test_a_reply_is_bounded_and_parameters_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM", "t-1")
    params = {
        "seed": 3,
        "extra_headers": {"x-team": "${TEAM}"},
        "extra_body": {"chat_template_kwargs": {"a": 1}},
    }
    async with ScoringServer(lambda _: "fine", keep=True).run() as server:
        await (await Router.make(settings(server)))(HELLO, None)
        await (await Router.make(settings(server, params=params, max_tokens=0)))(HELLO, None)
        await (await Router.make(settings(server, params={"max_tokens": 7})))(HELLO, None)
        usual, own, less = server.requests
        assert (usual["max_tokens"], less["max_tokens"]) == (8192, 7)
        assert (own["seed"], own["chat_template_kwargs"], "max_tokens" in own) == (3, {"a": 1}, False)
        assert [h.get("x-team") for h in server.headers] == [None, "t-1", None]


@pytest.mark.usefixtures("routers")
async def test_what_a_model_does_not_take_is_left_out_or_an_error() -> None:
    async with ScoringServer(lambda _: "fine", keep=True).run() as server:
        asked = settings(server, params={"reasoning_effort": "low"})
        asked = msgspec.structs.replace(asked, model="openai/gpt-4o-mini")
        assert (await (await Router.make(asked))(HELLO, None)).text == "fine"
        assert "reasoning_effort" not in server.requests[0]
        strict = msgspec.structs.replace(asked, params={"reasoning_effort": "low", "drop_params": False})
        with pytest.raises(ModelError, match="does not support parameters"):
            await (await Router.make(strict))(HELLO, None)
        takes = msgspec.structs.replace(strict, model="openai/gpt-5-mini")
        await (await Router.make(takes))(HELLO, None)
        assert server.requests[1]["reasoning_effort"] == "low"
        assert server.requests[1]["max_completion_tokens"] == 8192  # litellm's name for it with this model


@pytest.mark.usefixtures("routers")
async def test_azure_is_asked_as_an_application_of_a_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A placeholder for the missing key once kept litellm from asking for a token."""
    from litellm.llms.azure import common_utils

    asked: list[dict[str, Any]] = []

    def token_of(**identity: Any) -> Any:
        asked.append(identity)
        return lambda: "t-2"

    monkeypatch.setattr(common_utils, "get_azure_ad_token_from_entra_id", token_of)
    monkeypatch.setenv("SECRET", "s-1")
    params = {
        "api_version": "2025-04-01-preview",
        "tenant_id": "t",
        "client_id": "c",
        "client_secret": "${SECRET}",
    }
    async with ScoringServer(lambda _: "fine", keep=True).run() as server:
        config = JudgeConfig(
            model="azure/mine", api_base=server.url.removesuffix("/v1"), retries=0, params=params
        )
        assert (await (await Router.make(config))(HELLO, None)).text == "fine"
        assert server.headers[0]["authorization"] == "Bearer t-2"
    assert {k: asked[0][k] for k in ("tenant_id", "client_id", "client_secret")} == {
        "tenant_id": "t", "client_id": "c", "client_secret": "s-1",
    }  # fmt: skip


@pytest.mark.usefixtures("routers")
async def test_azure_is_asked_with_an_identity_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENTRA_TOKEN", "t-1")
    params = {"api_version": "2025-04-01-preview", "azure_ad_token": "${ENTRA_TOKEN}"}
    async with ScoringServer(lambda _: "fine", keep=True).run() as server:
        config = JudgeConfig(
            model="azure/mine", api_base=server.url.removesuffix("/v1"), retries=0, params=params
        )
        assert (await (await Router.make(config))(HELLO, None)).text == "fine"
        assert server.headers[0]["authorization"] == "Bearer t-1"
        assert "api-key" not in server.headers[0]


@pytest.mark.usefixtures("routers")
async def test_a_key_goes_to_its_provider_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k-1")
    config = JudgeConfig(
        model="openai/a",
        fallbacks=("openai/b", "anthropic/c"),
        api_base="http://127.0.0.1:1",
        api_key_env="JUDGE_KEY",
    )
    listed = (await Router.make(config))._router.model_list
    assert [d["litellm_params"].get("api_key") for d in listed] == ["k-1", "k-1", None]
    assert [d["litellm_params"].get("api_base") for d in listed] == ["http://127.0.0.1:1"] * 2 + [None]


@pytest.mark.usefixtures("routers")
@pytest.mark.parametrize("workers", [0, 1])
async def test_a_prompt_that_is_too_long_is_an_error_of_its_own(workers: int) -> None:
    refusal = "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens."
    async with (
        ScoringServer(lambda _: 400, refusal=refusal).run() as server,
        open_complete(settings(server, workers=workers, max_tokens=100)) as complete,
    ):
        with pytest.raises(ContextWindowError, match="maximum context length"):
            await complete(HELLO, SCHEMA)


@pytest.mark.usefixtures("routers")
async def test_a_small_context_is_not_used_up_by_the_tokens_of_the_reply() -> None:
    """A judge model with 4,096 tokens refuses every prompt that comes with `max_tokens` of 8,192."""

    def answer(request: dict[str, Any]) -> Answer:
        prompt = sum(len(m["content"]) for m in request["messages"]) // 3
        return 400 if prompt + request["max_tokens"] > 4096 else "fine"

    refusal = "This model's maximum context length is 4096 tokens."
    async with ScoringServer(answer, refusal=refusal, keep=True).run() as server:
        router = await Router.make(settings(server))
        assert (await router(HELLO, SCHEMA)).text == "fine"
        assert (await router(HELLO, SCHEMA)).text == "fine"
        assert [r["max_tokens"] for r in server.requests] == [8192, 4096, 2048, 2048]
        several = await Router.make(settings(server))
        async with anyio.create_task_group() as tg:
            for _ in range(4):
                tg.start_soon(several, HELLO, SCHEMA)
        assert server.requests[-1]["max_tokens"] == 2048  # however many calls learned it at once
        with pytest.raises(ContextWindowError):  # this prompt is what is too long
            await router([{"role": "user", "content": "x" * 20_000}], SCHEMA)
        assert server.requests[-1]["max_tokens"] == 2048
        with pytest.raises(ContextWindowError):
            await (await Router.make(settings(server, params={"max_tokens": 5000})))(HELLO, SCHEMA)


@pytest.mark.usefixtures("routers")
async def test_a_reply_that_was_cut_off_says_so() -> None:
    async with ScoringServer(lambda _: "{", finish_reason="length").run() as server:
        assert (await (await Router.make(settings(server)))(HELLO, None)).cut_off


@pytest.mark.usefixtures("routers")
async def test_a_slow_provider_is_given_up() -> None:
    async with ScoringServer(delay_s=30).run() as server:
        with pytest.raises(ModelError, match="Timeout"):
            await (await Router.make(settings(server, request_timeout_s=0.3)))(HELLO, None)


@pytest.mark.usefixtures("routers")
async def test_a_key_that_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="the environment has no NO_SUCH_KEY"):
        await Router.make(JudgeConfig(model="openai/x", api_key_env="NO_SUCH_KEY"))


def test_without_a_judge_model_litellm_is_not_imported() -> None:
    code = (
        "import judge.service, judge.rewards.compose, judge.models.llm, sys; print('litellm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.usefixtures("routers")
async def test_the_scoring_server_speaks_http_and_names_what_it_is_told_to() -> None:
    async with ScoringServer(Scorer()).run() as server, httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/models")).json()["data"][0]["id"] == "scorer"
        assert (await client.post("/embeddings", json={})).status_code == 404
        reply = await client.post("/chat/completions", json={"model": "m", "messages": HELLO})
        assert json.loads(reply.json()["choices"][0]["message"]["content"]) == {"scores": []}


def test_the_scoring_server_s_command_serves_at_the_address_it_prints() -> None:
    command = [sys.executable, "-m", "tests.kits.scoring_server", "--delay-ms", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        body = {"model": "m", "messages": HELLO}
        assert httpx.post(f"{url}/chat/completions", json=body).status_code == 200
        process.terminate()
