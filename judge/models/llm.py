"""The judge model, through litellm's router: any provider, any OpenAI-compatible URL.

litellm takes seconds to import and would fetch a price list, so it is imported only when a judge model is configured,
in a thread, and with its own copy of the list.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import anyio.to_thread

from judge.models.params import of_model
from pipeline.config import ConfigError, JudgeConfig
from pipeline.telemetry.logs import get_logger

log = get_logger("judge.models.llm")

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Reply:
    """What a judge model said, and what it took."""

    text: str
    model: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    """0 where the price is not known."""
    latency_s: float = 0.0
    cut_off: bool = False
    """The reply ended at the limit of tokens, not where the model wanted to end it."""


_IDENTITIES = ("azure", "azure_ai", "bedrock", "vertex_ai", "sagemaker", "watsonx")
"""Providers that know other credentials than a key, which litellm would not look for if there were one."""


_LEAST_REPLY = 512
"""Tokens of a reply that are never taken for a longer prompt."""


class ModelError(Exception):
    """The judge model could not be reached or refused, after the router's own retries and fallbacks."""


def pooled(config: JudgeConfig) -> bool:
    """Whether `judge.concurrency` is kept by the connection pool, so that litellm's own time is no part of a call's place:
    while all places are taken, the next calls are made ready. With fallbacks, or a provider whose client is not OpenAI's,
    the places have to be counted around litellm."""
    own_way = ("api_key", "api_base", "base_url", "organization", "timeout", "ssl_verify")
    tables = (config.params, config.model_params.get(config.model, {}))
    return (
        config.model.startswith("openai/")
        and not config.fallbacks
        and not any(key in table for table in tables for key in own_way)
    )


def calls_at_once(config: JudgeConfig) -> int:
    """Calls of `Complete` that may run at once; those beyond `judge.concurrency` wait at the connection pool."""
    return config.concurrency * (2 if pooled(config) else 1)


class ContextWindowError(ModelError):
    """The prompt, with the tokens that a reply may have, is more than the model takes."""


class Complete(Protocol):
    """One call of a judge model."""

    async def __call__(self, messages: Messages, schema: dict[str, Any] | None) -> Reply:
        """`schema` is a `response_format`. Raises `ModelError`, and its `ContextWindowError` where the prompt is too long."""


def _import_litellm() -> Any:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    litellm.telemetry = False
    litellm.suppress_debug_info = True
    for name in ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return litellm


class Router:
    """`litellm.Router` over the configured model and its fallbacks."""

    def __init__(self, config: JudgeConfig, litellm: Any) -> None:
        key = ""
        if config.api_key_env:
            key = os.environ.get(config.api_key_env, "")
            if not key:
                raise ConfigError(f"judge.api_key_env: the environment has no {config.api_key_env}")
        self._config = config
        self._litellm = litellm
        self._structured = config.structured != "text"
        self._max_tokens = config.max_tokens
        names = [config.model, *config.fallbacks]
        self._router = litellm.Router(
            model_list=[self._deployment(name, key) for name in names],
            num_retries=config.retries,
            timeout=config.request_timeout_s,
            fallbacks=[{config.model: list(config.fallbacks)}] if config.fallbacks else [],
            disable_cooldowns=len(names) == 1,
        )
        self._client: Any = None
        if pooled(config):
            import httpx
            import openai

            self._client = openai.AsyncOpenAI(
                api_key=key or "none",
                base_url=config.api_base or None,
                max_retries=0,
                timeout=config.request_timeout_s,
                http_client=httpx.AsyncClient(
                    limits=httpx.Limits(
                        max_connections=config.concurrency, max_keepalive_connections=config.concurrency
                    ),
                    timeout=config.request_timeout_s,
                ),
            )
        if len(names) == 1:
            # The router counts calls and tokens a minute, for limits and cooldowns that are not in use here, in callbacks
            # that make litellm assemble a log record of every call: a fifth of a call's CPU time.
            for callbacks in (litellm.success_callback, litellm._async_success_callback):
                callbacks[:] = [c for c in callbacks if getattr(c, "__self__", None) is not self._router]

    @classmethod
    async def make(cls, config: JudgeConfig) -> Router:
        """Raises `ConfigError` where the key is missing."""
        return cls(config, await anyio.to_thread.run_sync(_import_litellm))

    async def aclose(self) -> None:
        """Close the connections that are this router's own."""
        if self._client is not None:
            await self._client.close()

    def _provider(self, name: str) -> str:
        try:
            return str(self._litellm.get_llm_provider(name)[1])
        except self._litellm.exceptions.BadRequestError:  # litellm does not know the name
            return name.partition("/")[0]

    def _deployment(self, name: str, key: str) -> dict[str, Any]:
        # What a model does not take (a temperature, say) is left out, unless `judge.params` says that it is an error.
        parameters: dict[str, Any] = {"model": name, "drop_params": True}
        same_provider = self._provider(name) == self._provider(self._config.model)
        if same_provider:  # key and address go nowhere else
            if self._config.api_base:
                parameters["api_base"] = self._config.api_base
            if key:
                parameters["api_key"] = key
            elif self._config.api_base and self._provider(name) not in _IDENTITIES:
                parameters["api_key"] = "none"  # OpenAI's client asks for one, a server of one's own does not
        if self._config.max_tokens:
            parameters["max_tokens"] = self._config.max_tokens
        own = of_model(self._config, name, same_provider=same_provider)
        if "max_completion_tokens" in own:
            parameters.pop("max_tokens", None)
        return {"model_name": name, "litellm_params": {**parameters, **own}}

    async def __call__(self, messages: Messages, schema: dict[str, Any] | None) -> Reply:
        parameters: dict[str, Any] = {}
        if self._config.temperature is not None:
            parameters["temperature"] = self._config.temperature
        if self._client is not None:
            parameters["client"] = self._client
        allowed = self._max_tokens
        if allowed < self._config.max_tokens:
            parameters["max_tokens"] = allowed
        structured = schema is not None and self._structured
        if structured:
            parameters["response_format"] = schema
        began = time.monotonic()
        try:
            response = await self._router.acompletion(
                model=self._config.model, messages=messages, **parameters
            )
        except self._litellm.exceptions.ContextWindowExceededError as error:
            if self._less_for_replies(messages, allowed):
                return await self(messages, schema)
            raise ContextWindowError(
                f"{self._config.model}: the prompt is too long: {str(error)[:500]}"
            ) from error
        except self._litellm.exceptions.BadRequestError as error:
            if structured and self._config.structured == "auto" and _about_the_schema(str(error)):
                log.warning("no structured output", model=self._config.model, detail=str(error)[:300])
                self._structured = False
                return await self(messages, None)
            raise ModelError(f"{self._config.model} refused: {str(error)[:500]}") from error
        except asyncio.CancelledError:
            raise
        except Exception as error:  # providers raise what they like; the edge of what is ours
            raise ModelError(
                f"{self._config.model} failed: {type(error).__name__}: {str(error)[:500]}"
            ) from error
        return self._reply(response, time.monotonic() - began)

    def _less_for_replies(self, messages: Messages, allowed: int) -> bool:
        """Whether it is the reply's tokens that leave too little of a small context for this prompt; then they are halved.
        A number that `judge.params` gives stays as it is."""
        given = {**self._config.params, **self._config.model_params.get(self._config.model, {})}
        prompt = sum(len(m["content"].encode()) for m in messages) // 3
        if {"max_tokens", "max_completion_tokens"} & given.keys() or prompt > allowed:
            return False
        if self._max_tokens < allowed:
            return True  # another call that was under way has learned it
        if allowed < 2 * _LEAST_REPLY:
            return False
        self._max_tokens //= 2
        log.warning(
            "judge.max_tokens leaves no room for the prompt", model=self._config.model, now=self._max_tokens
        )
        return True

    def _reply(self, response: Any, took_s: float) -> Reply:
        usage = getattr(response, "usage", None)
        cost = (getattr(response, "_hidden_params", None) or {}).get("response_cost")
        message = response.choices[0].message if response.choices else None
        return Reply(
            text=(getattr(message, "content", None) or "") if message is not None else "",
            model=str(getattr(response, "model", "") or self._config.model),
            prompt_tokens=int(getattr(usage, "prompt_tokens", 0) or 0),
            completion_tokens=int(getattr(usage, "completion_tokens", 0) or 0),
            cost_usd=float(cost or 0.0),
            latency_s=took_s,
            cut_off=bool(response.choices) and response.choices[0].finish_reason == "length",
        )


@asynccontextmanager
async def open_router(config: JudgeConfig) -> AsyncIterator[Complete]:
    """The judge model, called from this process. Raises `ConfigError` where the key is missing."""
    router = await Router.make(config)
    try:
        yield router
    finally:
        await router.aclose()


def _about_the_schema(message: str) -> bool:
    return any(word in message.lower() for word in ("response_format", "json_schema", "schema", "structured"))
