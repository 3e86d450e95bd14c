"""`[[outside]]`: models of providers that the gateway answers with.

An *outside model* is not trained and not served here: the gateway passes calls on to its provider. A policy model can
learn from its answers as its *apprentice*, and take over its calls."""

from __future__ import annotations

from typing import Literal

from pipeline.config.types import Count, Natural, NotNegative, Percent, Positive, Section


class OutsideConfig(Section, frozen=True, kw_only=True):
    """A provider's model. Calls that name it are passed on in the provider's own dialect and recorded without tokens
    (docs/gateway.md). Of several tables with one `name`, a call goes to the first that speaks its dialect; the next is
    asked if that one can't be reached or answers 429 or 5xx."""

    name: str
    """Value of `model` in requests."""
    url: str
    """Base URL to which `/chat/completions`, `/responses` or `/messages` is added, such as
    `https://api.openai.com/v1`."""
    model: str = ""
    """The provider's name of the model. Empty: `name`."""
    api_key_env: str = ""
    """Environment variable with the provider's key, which the gateway alone reads. Empty: no key is sent."""
    dialect: Literal["chat", "responses", "messages"] = "chat"
    """The API that the provider speaks: `/v1/chat/completions`, `/v1/responses` or `/v1/messages`. A provider that
    speaks two has two tables. For one that speaks none, run litellm's proxy in between."""
    input_usd: NotNegative = 0.0
    """Price of a million input tokens, in USD."""
    cached_input_usd: NotNegative | None = None
    """Price of a million input tokens that the provider read from its cache. `None`: `input_usd`."""
    cache_write_usd: NotNegative | None = None
    """Price of a million input tokens that the provider wrote to its cache, as Anthropic bills them. `None`:
    `input_usd`."""
    output_usd: NotNegative = 0.0
    """Price of a million output tokens, in USD."""
    max_calls: Natural = 0
    """Calls at once, in each gateway process. Beyond it the next table of this name is asked; without one, the call
    gets a 429. 0: no limit."""
    timeout_s: Positive = 600.0
    """Longest duration of a call."""
    ask_usage: bool = True
    """Whether the gateway asks for the usage of streamed chat completions that do not ask themselves. Without it their
    cost is unknown. The chunk that holds it is not passed on."""
    apprentice: str = ""
    """Policy model that learns from this outside model and may take it over, by decisions (docs/operations.md). All
    tables of one name name the same. Empty: none."""
    apprentice_wait_s: NotNegative = 60.0
    """Seconds that the apprentice has for an answer, or for the beginning of a streamed one, in a run that it took
    over. After that, and after an error, this model answers. 0: the agent gets the error."""
    may_train: bool = False
    """Whether the provider's terms permit that a model learns from its outputs. If false, no data set, hint or
    correction takes them. All tables of one name must permit it."""
    shadow_percent: Percent = 0.0
    """Percentage of this model's complete calls about which the apprentice's newest version is asked too. Its answers
    are recorded and compared; they reach no agent and teach nothing. Drawn for each call by a hash of run and call."""
    shadow_calls: Count = 4
    """Shadow calls at once, in each gateway process. One begins at a server that answers no other call, and is broken
    off when another call comes there. What can't begin waits in a queue; what finds it full is dropped
    (`journeywork_shadows` of `/metrics`)."""
