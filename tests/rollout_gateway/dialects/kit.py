"""Helpers for tests of the translated APIs: tools, and Anthropic's client."""

import json
from typing import Any

import anthropic
from msgspec import Raw

from pipeline.events import ExchangeRecorded
from tests.kits.clients import closed_after_test
from tests.kits.events import exchange
from tests.rollout_gateway.agents.move_tool import MOVE
from tests.rollout_gateway.conftest import GatewayProcess

SCHEMA: Any = MOVE["function"]["parameters"]
RESPONSE_TOOL: Any = {"type": "function", "name": "move", "parameters": SCHEMA, "strict": True}


NO_SPACE = {"logit_bias": {str(token): -100 for token in (197, 198, 201, 220)}}
"""Or a model that knows no JSON fills it with white space until its tokens run out."""

CODEX: Any = [
    {"type": "function", "name": "exec", "parameters": {"type": "object"}, "strict": False},
    {
        "type": "namespace",
        "name": "mcp__games",
        "description": "Games.",
        "tools": [{"type": "function", "name": "move", "parameters": SCHEMA, "strict": True}],
    },
    {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": {"type": "text"}},
    {"type": "web_search", "external_web_access": True},
    {"type": "local_shell"},
]


def claude(gateway: GatewayProcess, opened: dict[str, Any]) -> anthropic.Anthropic:
    """Anthropic's clients add `/v1` themselves. The client is closed when the test ends."""
    base_url = opened["base_url"].removesuffix("/v1")
    return closed_after_test(anthropic.Anthropic(base_url=base_url, api_key=opened["api_key"], max_retries=0))


def completion(message: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {"id": "chatcmpl-7f", "created": 7, "model": "m@0", "choices": [choice], "usage": usage}


def recorded(request: dict[str, Any], message: dict[str, Any]) -> ExchangeRecorded:
    bodies = {"request": Raw(json.dumps(request).encode()), "response": Raw(json.dumps(completion(message)).encode())}
    return exchange("t", prompt=(), sampled=(), **bodies)
