"""Calls through litellm's router: any provider, its prices.

litellm takes seconds to import and would fetch a price list, so it is imported only when a model is opened, with the
price list that comes with it. What a server answers is not trusted: it becomes a `ModelReply` or a `ModelError`.
"""

from __future__ import annotations

import logging
import math
import os
import time
from typing import Any

from judge.models.chat import ContextWindowError, InvalidRequestError, Messages, ModelError, ModelReply, well_formed
from judge.models.params import advice_on_key, resolve_params
from pipeline.chat.conversations import text_of
from pipeline.config import ConfigError, JudgeConfig
from pipeline.errors import without_sent

_WITH_IDENTITIES = ("azure", "azure_ai", "bedrock", "vertex_ai", "sagemaker", "watsonx")
"""Providers with credentials other than a key. litellm would not look for those if it were given a placeholder key."""
_WITHOUT_KEY_REFUSED = ("openai", "anthropic", "gemini")
"""Providers whose calls litellm does not even send without a key in a variable that begins with the provider's name."""
_MAX_NAME = 200
"""Characters of a model's name that are kept."""
_MAX_TOKENS = 1 << 40
"""A larger count of tokens is none."""


def _import_litellm() -> Any:
    """Import litellm, quiet and without its requests to the network."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    litellm.telemetry = False
    litellm.suppress_debug_info = True
    for name in ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return litellm


class LiteLlmClient:
    """Sends requests to `judge.model`."""

    def __init__(self, config: JudgeConfig, key: str) -> None:
        """`key` may be empty. Blocks for the import of litellm.

        Raises `ConfigError` if litellm knows no provider for the model, it has no key, or a parameter cannot be used or
        refers to a missing environment variable."""
        self._config, self._key = config, key
        self._litellm = _import_litellm()
        try:
            self._router = self._litellm.Router(
                model_list=[{"model_name": config.model, "litellm_params": self._parameters()}],
                num_retries=config.request.retries,
                timeout=config.request.timeout_s,
                disable_cooldowns=True,
            )
        except self._litellm.exceptions.BadRequestError as error:
            raise ConfigError(
                f"judge.model: litellm knows no provider for {config.model!r}: write <provider>/<model>, such as "
                "openai/gpt-5 or, for your own server at judge.api_base, openai/<its name>"
            ) from error
        # The router counts calls and tokens for limits and cooldowns, which a single model does not have. The callbacks
        # make litellm assemble a log record of every call: a fifth of a call's CPU time.
        for callbacks in (self._litellm.success_callback, self._litellm._async_success_callback):
            callbacks[:] = [c for c in callbacks if getattr(c, "__self__", None) is not self._router]

    def _parameters(self) -> dict[str, Any]:
        """Return litellm's parameters of every call: model, address, key, `max_tokens` and `judge.request.params`.
        Raises litellm's `BadRequestError` if it knows no provider of the model, and `ConfigError` if the provider needs
        a key and there is none."""
        # A parameter that the model does not take is left out, unless `judge.request.params` sets `drop_params =
        # false`.
        name = self._config.model
        provider = str(self._litellm.get_llm_provider(name, api_base=self._config.api_base or None)[1])
        parameters: dict[str, Any] = {"model": name, "drop_params": True}
        if self._config.api_base:
            parameters["api_base"] = self._config.api_base
        if self._key:
            parameters["api_key"] = self._key
        elif self._config.api_base and provider not in _WITH_IDENTITIES:
            # OpenAI's client insists on a key; a server without keys ignores it.
            parameters["api_key"] = "none"
        if self._config.request.max_tokens:
            parameters["max_tokens"] = self._config.request.max_tokens
        params = resolve_params(self._config)
        if isinstance(headers := params.get("extra_headers"), dict):
            # OpenAI's client would send `authorization` beside its own `Authorization`.
            names = {n: "Authorization" if n.lower() == "authorization" else n for n in headers}
            params["extra_headers"] = {names[n]: value for n, value in headers.items()}
        if "api_key" not in {*parameters, *params} and (missing := self._missing_key(provider)):
            if not {"api_base", "base_url"} & params.keys():  # litellm's two names of an address
                unset = f"{name} needs a key: set {' or '.join(missing)} in the environment of the judge"
                raise ConfigError(f"judge.model: {unset}, or {advice_on_key(self._config)}")
            parameters["api_key"] = "none"
        if "max_completion_tokens" in params:
            parameters.pop("max_tokens", None)
        return {**parameters, **params}

    def _missing_key(self, provider: str) -> list[str]:
        """Return the environment variables that would hold the key without which litellm sends no call; empty if one is
        set, or the provider needs none."""
        others = any(variable.startswith(f"{provider.upper()}_") for variable in os.environ)
        if others or provider not in _WITHOUT_KEY_REFUSED:
            return []
        return list(self._litellm.validate_environment(self._config.model)["missing_keys"])

    async def send(self, messages: Messages, parameters: dict[str, Any]) -> ModelReply:
        """Make one call with these parameters of OpenAI's API, after those of the settings. Raises `ModelError`,
        `InvalidRequestError` or `ContextWindowError`."""
        began, model = time.monotonic(), self._config.model
        try:
            response = await self._router.acompletion(model=model, messages=messages, **parameters)
            return _read(response, model, time.monotonic() - began)
        except self._litellm.exceptions.ContextWindowExceededError as error:
            raise ContextWindowError(f"the prompt is too long for {model}: {describe(error, messages)}") from error
        except (self._litellm.exceptions.BadRequestError, self._litellm.exceptions.UnprocessableEntityError) as error:
            raise InvalidRequestError(f"request refused by {model}: {describe(error, messages)}", str(error)) from error
        except Exception as error:  # litellm lets errors of many libraries through
            at = f" at {self._config.api_base} (judge.api_base)" if self._config.api_base else ""
            # Other errors may quote the reply that litellm could not read.
            refused = getattr(error, "status_code", 500) < 500
            why = describe(error, messages) if refused else type(error).__name__
            if isinstance(error, self._litellm.exceptions.AuthenticationError):
                why += f": {advice_on_key(self._config)}"
            raise ModelError(f"call of {model}{at}: {why}") from error


def _read(response: Any, model: str, latency_s: float) -> ModelReply:
    """Return litellm's response as a `ModelReply`. `model`: the name to use if the response has none. Without a choice
    the text is empty."""
    choice, usage = response.choices[0] if response.choices else None, response.usage
    cost = float((getattr(response, "_hidden_params", None) or {}).get("response_cost") or 0.0)
    return ModelReply(
        text=well_formed(choice.message.content or "") if choice else "",
        model=well_formed(response.model or model)[:_MAX_NAME],
        prompt_tokens=_tokens(usage.prompt_tokens),
        completion_tokens=_tokens(usage.completion_tokens),
        cost_usd=cost if 0 <= cost < math.inf else 0.0,
        latency_s=latency_s,
        cut_off=choice is not None and choice.finish_reason == "length",
    )


def _tokens(count: int) -> int:
    """Return a server's count of tokens, 0 in place of a negative or absurdly large one."""
    return count if 0 <= count < _MAX_TOKENS else 0


def describe(error: Exception, messages: Messages) -> str:
    """Return an error's class and message, for logs and events, without texts of runs."""
    message = without_sent(str(error)[:500], "".join(text_of(m.get("content")) for m in messages))
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
