"""The judge model of the settings: adapts requests to what the model accepts.

A request is adapted in two ways. If the provider rejects the JSON schema, later requests go without it. If a small
context has no room for prompt and reply, fewer tokens are reserved for replies.
"""

from __future__ import annotations

from typing import Any

import anyio
import anyio.to_thread

from judge.models.chat import ContextWindowError, InvalidRequestError, Messages, ModelError, ModelReply
from judge.models.litellm_client import LiteLlmClient
from judge.models.params import read_key
from pipeline.chat.conversations import text_of
from pipeline.config import JudgeConfig
from pipeline.telemetry.logs import get_logger

logger = get_logger("judge.models.judge_model")

_MIN_REPLY_TOKENS = 512
"""`max_tokens` is never halved below this; a longer prompt is then the prompt's fault."""
_PAUSE_S = 60.0
"""Longest pause of a client between two attempts at a call."""
_SCHEMA_WORDS = ("response_format", "json_schema", "schema", "structured")
"""Words by which a provider's error is taken to be about the schema."""


class JudgeModel:
    """A `ChatModel` through litellm. At most `judge.concurrency` calls run at once; the others wait for their turn."""

    def __init__(self, config: JudgeConfig, client: LiteLlmClient) -> None:
        self._config, self._client = config, client
        self._turns = anyio.CapacityLimiter(config.concurrency)
        self._structured = True
        self._max_tokens = config.request.max_tokens
        # A client's own limit holds for each read, so a server that sends a byte now and then exceeds it.
        self._limit_s = (config.request.retries + 1) * (config.request.timeout_s + _PAUSE_S)

    async def __call__(self, messages: Messages, schema: dict[str, Any] | None) -> ModelReply:
        """Ask the model. If it refuses the schema, this and all later requests are sent without one; if prompt and
        reply do not fit into its context, with fewer tokens for the reply. Raises `ModelError`."""
        request = self._config.request
        while True:
            reply_tokens, structured = self._max_tokens, schema is not None and self._structured
            parameters: dict[str, Any] = {}
            if request.temperature is not None:
                parameters["temperature"] = request.temperature
            if reply_tokens < request.max_tokens:
                parameters["max_tokens"] = reply_tokens
            if structured:
                parameters["response_format"] = schema
            try:
                async with self._turns:
                    with anyio.fail_after(self._limit_s):
                        return await self._client.send(messages, parameters)
            except TimeoutError as error:
                why = f"call of {self._config.model}: no whole reply within {self._limit_s:.0f} s"
                raise ModelError(why) from error
            except ContextWindowError:
                if not self._reserve_less(messages, reply_tokens):
                    raise
            except InvalidRequestError as error:
                about_schema = any(word in error.said.lower() for word in _SCHEMA_WORDS)
                if not (structured and about_schema):
                    raise
                logger.warning("no structured output", model=self._config.model, detail=str(error)[:300])
                self._structured = False

    def _reserve_less(self, messages: Messages, reply_tokens: int) -> bool:
        """Halve the tokens reserved for replies if they, and not the prompt, take most of the context. `reply_tokens`:
        how many were reserved in the call that the model refused.

        Return whether the call is worth repeating. A limit set in `judge.request.params` is never changed."""
        params = self._config.request.params
        prompt_tokens = sum(len(text_of(m["content"]).encode()) for m in messages) // 3  # as `BYTES_PER_TOKEN`
        if {"max_tokens", "max_completion_tokens"} & params.keys() or prompt_tokens > reply_tokens:
            return False
        if self._max_tokens < reply_tokens:
            return True  # a concurrent call has halved it already
        if reply_tokens < 2 * _MIN_REPLY_TOKENS:
            return False
        self._max_tokens //= 2
        logger.warning("max_tokens halved: no room for the prompt", model=self._config.model, now=self._max_tokens)
        return True


async def open_judge_model(config: JudgeConfig) -> JudgeModel:
    """Return the model `judge.model`. litellm is imported in a thread.

    Raises `ConfigError` if an environment variable or a parameter is missing or cannot be used."""
    key = read_key(config.api_key_env, "judge.api_key_env")
    return JudgeModel(config, await anyio.to_thread.run_sync(LiteLlmClient, config, key))
