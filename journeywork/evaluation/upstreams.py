"""Where the calls of an external entrant go: an OpenAI-compatible server.

It is always asked for a plain reply. An agent that asks for a stream gets the reply as one chunk.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import httpx

from journeywork.evaluation.entrants import Entrant
from journeywork.transport import authorization

_TIMEOUT_S = 600.0


class UpstreamError(Exception):
    """The call failed. `status` is the HTTP status for the agent, whose client decides whether to try again."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Reply:
    """The answer to a call."""

    body: bytes
    content_type: str
    prompt_tokens: int
    completion_tokens: int


class Upstream:
    """An OpenAI-compatible server."""

    def __init__(self, entrant: Entrant) -> None:
        self._entrant = entrant
        key = os.environ.get(entrant.key_env, "") if entrant.key_env else ""
        if entrant.key_env and not key:
            raise ValueError(f"{entrant.name}: the environment variable {entrant.key_env} is not set")
        self._http = httpx.Client(headers=authorization(key), timeout=_TIMEOUT_S)

    def ask(self, path: str, body: dict[str, Any]) -> Reply:
        """Send the call. `path` is that of the agent's request. Raises `UpstreamError`."""
        call = {k: v for k, v in body.items() if k not in ("stream", "stream_options")} | {
            "model": self._entrant.model
        }
        try:
            reply = self._http.post(self._entrant.url + path.removeprefix("/v1"), json=call)
        except httpx.TransportError as error:
            raise UpstreamError(503, f"{self._entrant.url}: {error or type(error).__name__}") from error
        if not reply.is_success:
            raise UpstreamError(reply.status_code, f"{self._entrant.url} answered: {reply.text[:500]}")
        try:
            found = reply.json()
        except ValueError as error:
            raise UpstreamError(502, f"{self._entrant.url} answered no JSON: {reply.text[:200]!r}") from error
        return _reply(found, bool(body.get("stream")))

    def close(self) -> None:
        self._http.close()


def _reply(found: dict[str, Any], stream: bool) -> Reply:
    usage = found.get("usage") or {}
    tokens = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    if not stream:
        return Reply(json.dumps(found).encode(), "application/json", *tokens)
    return Reply(_as_stream(found), "text/event-stream", *tokens)


def _as_stream(found: dict[str, Any]) -> bytes:
    """Return a completion as the events of a stream: one chunk with the whole reply, then the usage."""
    choices = []
    for choice in found.get("choices", []):
        message = choice.get("message")
        rest = {k: v for k, v in choice.items() if k != "message"}
        if message is None:  # a text completion
            choices.append(rest)
            continue
        calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls") or [])]
        delta = {k: v for k, v in message.items() if k != "tool_calls"}
        choices.append({**rest, "delta": {**delta, **({"tool_calls": calls} if calls else {})}})
    head = {k: v for k, v in found.items() if k not in ("choices", "usage")}
    if head.get("object") == "chat.completion":
        head["object"] = "chat.completion.chunk"
    chunks = [{**head, "choices": choices}, {**head, "choices": [], "usage": found.get("usage")}]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks).encode() + b"data: [DONE]\n\n"
