"""Calls to an OpenAI-compatible URL with OpenAI's own client, for a judge model on a server of one's own.

docs/decisions/judge.md has the figures: a call takes about a quarter of the CPU time that litellm needs, and litellm's
import (3 s, 150 MB) is saved.
"""

from __future__ import annotations

import inspect
import json
import re
import time
from typing import Any

from judge.models.chat import (
    ContextWindowError,
    InvalidRequestError,
    Messages,
    ModelError,
    ModelReply,
    describe,
    make_reply,
)
from judge.models.params import advice_on_key, resolve_params
from pipeline.config import JudgeConfig

_PREFIX = "openai/"
_OPENAI_OWN = re.compile(r"(?:ft:)?(?:gpt-(?!oss)|chatgpt|o\d|codex)")
"""OpenAI's own models. litellm knows their prices, and which of them reject a parameter or want another name for it."""
_TOO_LONG = re.compile(
    r"context.?(?:length|window|size|limit)|longer than the m|maximum (?:input|model|prompt) length|max_new_tokens"
    r"|maximum number of tokens|exceeds? .{0,40}tokens|tokens exceed|prompt is too long",
    re.I,
)
"""Matches errors about a prompt that exceeds the model's context (vLLM, SGLang, TGI, llama.cpp, OpenAI)."""


class OpenAiClient:
    """A `Client` for `openai/<name>` at `judge.api_base`."""

    @staticmethod
    def supports(config: JudgeConfig) -> bool:
        """Return whether the settings need nothing that only litellm has: another provider, prices, its own parameters.

        Imports `openai`, which takes half a second, if the model and its address are right."""
        if not (config.api_base and config.model.startswith(_PREFIX)):
            return False
        if _OPENAI_OWN.match(config.model.removeprefix(_PREFIX)):
            return False
        from openai.resources.chat.completions import AsyncCompletions

        known = inspect.signature(AsyncCompletions.create).parameters
        return config.request.params.keys() <= known.keys()

    def __init__(self, config: JudgeConfig, key: str) -> None:
        """`key` may be empty. Raises `ConfigError` if a parameter refers to a missing environment variable."""
        import openai

        self._openai, self._config = openai, config
        self._name = config.model.removeprefix(_PREFIX)
        self._parameters = resolve_params(config)
        if config.request.max_tokens and "max_completion_tokens" not in self._parameters:
            self._parameters.setdefault("max_tokens", config.request.max_tokens)
        self._client = openai.AsyncOpenAI(
            api_key=key or "none",  # the client insists on one; a server without keys ignores it
            base_url=config.api_base,
            max_retries=config.request.retries,
            timeout=config.request.timeout_s,
        )

    async def aclose(self) -> None:
        await self._client.close()

    async def send(self, messages: Messages, parameters: dict[str, Any]) -> ModelReply:
        """Make one call, with `parameters` after those of the settings. Raises `ModelError` and its subclasses."""
        began = time.monotonic()
        sent: dict[str, Any] = {**self._parameters, **parameters, "messages": messages}
        try:
            # Its bytes: the library's objects hold whatever a server writes under any type.
            raw = await self._client.chat.completions.with_raw_response.create(model=self._name, **sent)
            body = json.loads(raw.content)
        except self._openai.APIStatusError as error:
            what = f"{self._name}: {describe(error, messages)}"
            if error.status_code in (400, 413, 422) and _TOO_LONG.search(str(error)):
                raise ContextWindowError(f"the prompt is too long for {what}") from error
            if error.status_code in (400, 422):
                raise InvalidRequestError(f"request refused by {what}", str(error)) from error
            advice = f": {advice_on_key(self._config)}" if error.status_code == 401 else ""
            raise ModelError(f"call of {what}{advice}") from error
        except (self._openai.OpenAIError, ValueError, RecursionError) as error:  # a body that is no JSON
            what = f"{self._name} at {self._config.api_base} (judge.api_base)"
            raise ModelError(f"call of {what}: {describe(error, messages)}") from error
        return make_reply(body, self._name, time.monotonic() - began)
