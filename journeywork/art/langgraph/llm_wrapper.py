"""The chat model of a rollout, and the trajectory of its calls.

`wrap_rollout` wraps a function that plays an agent of LangGraph. Inside of it `init_chat_model` returns a chat model of
LangChain for the model that is trained, and what this one is asked and answers becomes the trajectory that the wrapped
function returns."""

from __future__ import annotations

import contextvars
import functools
import json
import ssl
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import httpx
from openai import DefaultAsyncHttpxClient, DefaultHttpxClient

from journeywork.art.langgraph.conversations import add_call
from journeywork.art.model import Model
from journeywork.art.trajectories import Trajectory

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

P = ParamSpec("P")
T = TypeVar("T", bound=Trajectory)


class _Rollout:
    """A rollout that plays: its model, the trajectory of its calls, and the connections of its chat models."""

    def __init__(self, model: Model[Any]) -> None:
        self.model, self.captured, self.connections = model, Trajectory(), AsyncExitStack()

    def clients(self) -> tuple[DefaultHttpxClient, DefaultAsyncHttpxClient]:
        """Return a blocking and an asynchronous client whose answers are captured. They read an answer to its end
        before they hand it on, a stream too."""

        def read(response: Any) -> None:
            self._capture(response, response.read())

        async def read_later(response: Any) -> None:
            self._capture(response, await response.aread())

        blocking = DefaultHttpxClient(verify=_tls(), event_hooks={"response": [read]})
        asynchronous = DefaultAsyncHttpxClient(verify=_tls(), event_hooks={"response": [read_later]})
        self.connections.callback(blocking.close)
        self.connections.push_async_callback(asynchronous.aclose)
        return blocking, asynchronous

    def _capture(self, response: Any, body: bytes) -> None:
        """Add a call that succeeded to the trajectory."""
        if response.status_code == 200 and response.request.url.path.endswith("/chat/completions"):
            add_call(self.captured, json.loads(response.request.content), body)


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return the context of all clients: to make one takes 10 ms."""
    return httpx.create_ssl_context()


_current_rollout: contextvars.ContextVar[_Rollout | None] = contextvars.ContextVar("langgraph_rollout", default=None)


def wrap_rollout(model: Model[Any], fn: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Return `fn` with the calls of its chat models in the trajectory that it returns.

    Within `fn`, `init_chat_model` makes chat models of `model`, whose connections end with `fn`. If the trajectory that
    `fn` returns has no messages, it gets the conversations of these calls: the first one as `messages_and_choices`, the
    others as `additional_histories`."""

    @functools.wraps(fn)
    async def rollout(*args: P.args, **kwargs: P.kwargs) -> T:
        current = _Rollout(model)
        token = _current_rollout.set(current)
        try:
            async with current.connections:
                trajectory = await fn(*args, **kwargs)
        finally:
            _current_rollout.reset(token)
        if not trajectory.messages_and_choices:
            trajectory.messages_and_choices = current.captured.messages_and_choices
            # The agent may have added histories of its own.
            trajectory.additional_histories += current.captured.additional_histories
            trajectory.tools = current.captured.tools
        return trajectory

    return rollout


def init_chat_model(model: str | None = None, *, model_provider: str | None = None, **kwargs: Any) -> ChatOpenAI:
    """Return a LangChain chat model of the model that `wrap_rollout` was given, whose calls are recorded.

    `model` is its name in requests (default: that of the newest version). `kwargs` are those of LangChain's
    `ChatOpenAI`. Raises `RuntimeError` outside of `wrap_rollout`."""
    from langchain_openai import ChatOpenAI

    current = _current_rollout.get()
    if current is None:
        raise RuntimeError("init_chat_model must be called in a function that wrap_rollout wraps")
    served, (blocking, asynchronous) = current.model, current.clients()
    options: dict[str, Any] = {
        "model": model or served.get_inference_name(),
        "max_retries": 8,
        "base_url": served.inference_base_url,
        "api_key": served.inference_api_key,
        "http_client": blocking,
        "http_async_client": asynchronous,
        **kwargs,
    }
    return ChatOpenAI(**options)
