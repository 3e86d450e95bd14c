"""The chat model of a rollout, and the trajectory of its calls."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from journeywork.art.auto_trajectory import capture_auto_trajectory
from journeywork.art.model import Model
from journeywork.art.refused import refusing
from journeywork.art.trajectories import Trajectory

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI
__getattr__ = refusing(__name__)

P = ParamSpec("P")
T = TypeVar("T", bound=Trajectory)

_model: contextvars.ContextVar[Model[Any, Any] | None] = contextvars.ContextVar(
    "langgraph_model", default=None
)


def wrap_rollout(model: Model[Any, Any], fn: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Return `fn` with the calls of its chat models in the trajectory that it returns.

    Within `fn`, `init_chat_model` makes chat models of `model`. If the trajectory that `fn` returns has no messages, it
    gets the conversations of these calls: the first one as `messages_and_choices`, the others as
    `additional_histories`."""

    @functools.wraps(fn)
    async def rollout(*args: P.args, **kwargs: P.kwargs) -> T:
        returned: list[T] = []

        async def run() -> None:
            returned.append(await fn(*args, **kwargs))

        token = _model.set(model)
        try:
            captured = await capture_auto_trajectory(run())
        finally:
            _model.reset(token)
        (trajectory,) = returned
        if not trajectory.messages_and_choices:
            trajectory.messages_and_choices = captured.messages_and_choices
            trajectory.additional_histories += captured.additional_histories
            trajectory.tools = captured.tools
        return trajectory

    return rollout


def init_chat_model(
    model: str | None = None, *, model_provider: str | None = None, **kwargs: Any
) -> ChatOpenAI:
    """Return a LangChain chat model of the model that `wrap_rollout` was given, whose calls are recorded.

    `model` is its name in requests (default: that of the newest version). `kwargs` are those of LangChain's
    `ChatOpenAI`. Raises `RuntimeError` outside of `wrap_rollout`."""
    from langchain_openai import ChatOpenAI

    served = _model.get()
    if served is None:
        raise RuntimeError("init_chat_model must be called in a function that wrap_rollout wraps")
    address = {"base_url": served.inference_base_url, "api_key": served.inference_api_key}
    options = {"model": model or served.get_inference_name(), "max_retries": 8, **address, **kwargs}
    return ChatOpenAI(**options)
