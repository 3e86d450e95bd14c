"""Metrics of a step that a program measures itself: costs, times, tokens. `model.log` adds them to its row."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

from journeywork.art.refused import refusing

__getattr__ = refusing(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])

_active: ContextVar[MetricsBuilder] = ContextVar("metrics_builder")
_SUMMED = ("costs", "time", "data")
"""Sections whose metrics are also summed over all steps, as `<section>/cum/<name>`."""
_PRICES = ("prompt", "completion", "cached_prompt", "cache_creation", "cache_read")


@dataclass
class _Shared:
    """What the builders of one model share."""

    steps: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metrics that no row holds yet, by scope."""
    scenarios: dict[str, set[str]] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    prices: dict[str, dict[str, float | None]] = field(default_factory=dict)
    extractors: dict[str, Callable[[Any], float | None]] = field(default_factory=dict)


class MetricsBuilder:
    """Collects metrics until the next row of its scope. `cost_context` begins the names of costs: `train`, `eval`."""

    def __init__(
        self, cost_context: str, *, _shared: _Shared | None = None, _scope: str | None = None
    ) -> None:
        if not cost_context.strip():
            raise ValueError("cost_context must not be empty")
        self.cost_context = cost_context.strip()
        self._shared, self._scope = _shared or _Shared(), _scope or self.cost_context

    def for_cost_context(self, cost_context: str, *, buffer_scope: str | None = None) -> MetricsBuilder:
        """Return the builder of another context, with the same sums."""
        return MetricsBuilder(cost_context, _shared=self._shared, _scope=buffer_scope)

    def add_metric(self, key: str, value: float) -> None:
        """Add to a metric `<section>/<name>`. Raises `ValueError` for a name without section, for one of the sums, and
        for one that is above or below another metric, as `costs/a` is above `costs/a/b`."""
        name = key.partition("/")[2]
        if not name or name.startswith("cum/") or f"{key}/".startswith("costs/all/"):
            raise ValueError(
                f"{key!r} must be <section>/<name>, and not <section>/cum/<name> or costs/all, which are computed"
            )
        step = self._shared.steps.setdefault(self._scope, {})
        for other in step:
            if other.startswith(f"{key}/") or key.startswith(f"{other}/"):
                raise ValueError(f"{key!r} can't be a metric beside {other!r}: one is above the other")
        step[key] = step.get(key, 0.0) + float(value)

    def add_cost(self, path: str, usd: float) -> None:
        """Add a cost in US dollars to `costs/<path>`."""
        self.add_metric(f"costs/{path}", usd)

    def add_data(
        self,
        step_num_scenarios: int | None = None,
        step_actor_tokens: int | None = None,
        scenario_ids: list[str] | None = None,
    ) -> None:
        """Add counts. The ids of scenarios are counted once over all steps."""
        self._add("data", step_num_scenarios=step_num_scenarios, step_actor_tokens=step_actor_tokens)
        self._shared.scenarios.setdefault(self._scope, set()).update(map(str, scenario_ids or ()))

    def add_user_timing(
        self,
        step_wall_s: float | None = None,
        step_actor_s: float | None = None,
        step_eval_s: float | None = None,
    ) -> None:
        """Add seconds."""
        self._add("time", step_wall_s=step_wall_s, step_actor_s=step_actor_s, step_eval_s=step_eval_s)

    def add_idle_times(
        self, step_trainer_idle_s: float | None = None, step_actor_idle_s: float | None = None
    ) -> None:
        """Add seconds in which the trainer or the agents waited."""
        self._add("throughput", step_trainer_idle_s=step_trainer_idle_s, step_actor_idle_s=step_actor_idle_s)

    def _add(self, section: str, **values: float | None) -> None:
        for name, value in values.items():
            if value is not None:
                self.add_metric(f"{section}/{name}", value)

    @contextmanager
    def measure(self, key: str) -> Iterator[None]:
        """Add the seconds that the block takes."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.add_metric(key, time.monotonic() - started)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Add all metrics that the block adds or, if it raises, none: then its correction counts nothing twice."""
        before = self._shared.steps.get(self._scope, {}).copy()
        try:
            yield
        except BaseException:
            self._shared.steps[self._scope] = before
            raise

    def split_off(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Add those of `metrics` that are summed: costs and those of a step, such as `time/step_wall_s`. Return the
        others. Raises `ValueError` as `add_metric` does, and adds nothing then."""
        others = {}
        with self.whole():
            for name, value in metrics.items():
                if name.startswith(("costs/", "time/step_", "data/step_", "throughput/step_")):
                    self.add_metric(name, value)
                else:
                    others[name] = value
        return others

    # -- costs of calls ----------------------------------------------------------------------------------------------

    def register_cost_extractor(self, provider: str, extractor: Callable[[Any], float | None]) -> None:
        """Let a function return the cost of a provider's answers in US dollars."""
        self._shared.extractors[provider.strip().lower()] = extractor

    def register_model_pricing(
        self,
        model_name: str,
        *,
        prompt_per_million: float,
        completion_per_million: float,
        **cached: float | None,
    ) -> None:
        """Set prices in US dollars per million tokens."""
        given = {
            "prompt_per_million": prompt_per_million,
            "completion_per_million": completion_per_million,
            **cached,
        }
        self._shared.prices[model_name.strip()] = {
            name.removesuffix("_per_million"): v for name, v in given.items()
        }

    def add_response_cost(
        self, source: str, response: Any, *, provider: str, model_name: str, **prices: float | None
    ) -> float:
        """Add the cost of an answer to `costs/<context>/<source>`, and return it in US dollars.

        It is what the answer says it cost, else what the provider's extractor returns, else its tokens at `prices`
        (`prompt_price_per_million`, ...), at registered prices, or at those that litellm knows. Raises `ValueError` if
        the model has no price, or the answer no usage."""
        cost = _told_cost(response)
        if cost is None and (extractor := self._shared.extractors.get(provider.strip().lower())) is not None:
            cost = extractor(response)
        if cost is None:
            given = {name: prices.get(f"{name}_price_per_million") for name in _PRICES}
            set_prices = {name: price for name, price in given.items() if price is not None}
            known = self._shared.prices.get(model_name.strip(), {}) | set_prices
            if known.get("prompt") is None or known.get("completion") is None:
                known = _litellm_prices(provider, model_name) | known
            cost = _cost(response, known)
        if cost is None:
            raise ValueError(
                f"the cost of {model_name!r} of {provider!r} is not known: register it with register_model_pricing() "
                "or register_cost_extractor()"
            )
        self.add_cost(f"{self.cost_context}/{source.strip('/')}", cost)
        return cost

    # -- rows --------------------------------------------------------------------------------------------------------

    async def flush(self) -> dict[str, float]:
        """Return the metrics since the last call, with the sums of costs by their prefixes, and those over all
        steps."""
        shared = self._shared
        row = shared.steps.pop(self._scope, {})
        scenarios = shared.scenarios.pop(self._scope, set())
        for key, cost in [item for item in row.items() if item[0].startswith("costs/")]:
            parts = key.split("/")
            for prefix in ["/".join(parts[:depth]) for depth in range(2, len(parts))] + ["costs/all"]:
                row[prefix] = row.get(prefix, 0.0) + cost
        for key, value in list(row.items()):
            section, _, name = key.partition("/")
            if section in _SUMMED or (section == "throughput" and name.startswith("step_")):
                total = f"{section}/cum/{name.removeprefix('step_')}"
                row[total] = shared.sums[total] = shared.sums.get(total, 0.0) + value
        if scenarios:
            shared.seen |= scenarios
            row["data/cum/num_unique_scenarios"] = float(len(shared.seen))
        for who in ("trainer", "actor"):
            tokens, seconds = shared.sums.get(f"data/cum/{who}_tokens"), shared.sums.get(f"time/cum/{who}_s")
            if (
                tokens is not None
                and seconds
                and {f"data/step_{who}_tokens", f"time/step_{who}_s"} & row.keys()
            ):
                row[f"throughput/avg_{who}_tok_per_s"] = tokens / seconds
        return row

    def state_dict(self) -> dict[str, Any]:
        """Return the sums over all steps, as JSON."""
        return {"cum_state": dict(self._shared.sums), "unique_scenario_ids": sorted(self._shared.seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over sums that `state_dict` returned."""
        self._shared.sums = {str(name): float(value) for name, value in state.get("cum_state", {}).items()}
        self._shared.seen = set(map(str, state.get("unique_scenario_ids", ())))

    # -- the active builder ------------------------------------------------------------------------------------------

    def activate(self) -> Token[MetricsBuilder]:
        """Make this the builder to which `track_api_cost` adds."""
        return _active.set(self)

    @contextmanager
    def activate_context(self) -> Iterator[MetricsBuilder]:
        """As `activate`, for a block."""
        token = self.activate()
        try:
            yield self
        finally:
            _active.reset(token)

    @staticmethod
    def get_active() -> MetricsBuilder:
        """Return the active builder. Raises `LookupError` if there is none."""
        return _active.get()


def track_api_cost(
    *,
    source: str,
    provider: str,
    model_name: str,
    response_getter: Callable[[Any], Any] | None = None,
    **prices: float | None,
) -> Callable[[Function], Function]:
    """Add the costs of a function's answers to the active builder, if there is one: see `add_response_cost`.
    `response_getter` returns the answer of what the function returns."""

    def record(result: Any) -> Any:
        if (builder := _active.get(None)) is not None:
            response = response_getter(result) if response_getter is not None else result
            builder.add_response_cost(source, response, provider=provider, model_name=model_name, **prices)
        return result

    def decorate(function: Function) -> Function:
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def waiting(*args: Any, **options: Any) -> Any:
                return record(await function(*args, **options))

            return waiting  # type: ignore[return-value]  # of the same signature

        @wraps(function)
        def calling(*args: Any, **options: Any) -> Any:
            return record(function(*args, **options))

        return calling  # type: ignore[return-value]  # of the same signature

    return decorate


def _read(value: Any, *path: str) -> Any:
    """Return a field of an object or a dictionary, by its path; `None` if it is missing."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value


def _told_cost(response: Any) -> float | None:
    """Return what an answer of OpenRouter or litellm says that it cost."""
    for path in (("usage", "cost"), ("_hidden_params", "response_cost")):
        if isinstance(cost := _read(response, *path), int | float):
            return float(cost)
    return None


def _cost(response: Any, prices: Mapping[str, float | None]) -> float | None:
    """Return the cost of an answer's tokens, in the form of OpenAI or of Anthropic; `None` if it is not known."""
    usage, prompt, completion = _read(response, "usage"), prices.get("prompt"), prices.get("completion")
    if usage is None or prompt is None or completion is None:
        return None

    def price(name: str) -> float:
        return float(prompt if (given := prices.get(name)) is None else given)

    def tokens(*path: str) -> int:
        return int(_read(usage, *path) or 0)

    if _read(usage, "prompt_tokens") is not None:
        cached = tokens("prompt_tokens_details", "cached_tokens")
        asked = (tokens("prompt_tokens") - cached) * prompt + cached * price("cached_prompt")
        return (asked + tokens("completion_tokens") * completion) / 1e6
    if _read(usage, "input_tokens") is not None:
        made = tokens("cache_creation_input_tokens") * price("cache_creation")
        asked = (
            tokens("input_tokens") * prompt + made + tokens("cache_read_input_tokens") * price("cache_read")
        )
        return (asked + tokens("output_tokens") * completion) / 1e6
    return None


def _litellm_prices(provider: str, model_name: str) -> dict[str, float | None]:
    """Return litellm's prices of a model; empty if litellm is not installed or does not know it."""
    # Else its import asks the network for prices.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    try:
        from litellm import model_cost
    except ModuleNotFoundError:
        return {}
    known = model_cost.get(f"{provider}/{model_name}") or model_cost.get(model_name) or {}
    names = {
        "prompt": "input_cost_per_token", "completion": "output_cost_per_token",
        "cached_prompt": "cache_read_input_token_cost", "cache_read": "cache_read_input_token_cost",
        "cache_creation": "cache_creation_input_token_cost",
    }  # fmt: skip
    return {name: known[key] * 1e6 for name, key in names.items() if known.get(key) is not None}
