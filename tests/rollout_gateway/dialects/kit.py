"""Helpers for tests of the translated APIs: tools, and Anthropic's client."""

from __future__ import annotations

from typing import Any

import anthropic

from tests.kits.clients import closed_after_test
from tests.rollout_gateway.conftest import GatewayProcess

SCHEMA: Any = {
    "type": "object", "properties": {"cell": {"type": "string", "enum": ["a1", "b2"]}}, "required": ["cell"],
    "additionalProperties": False,
}  # fmt: skip
RESPONSE_TOOL: Any = {"type": "function", "name": "move", "parameters": SCHEMA, "strict": True}


NO_SPACE = {"logit_bias": {str(token): -100 for token in (197, 198, 201, 220)}}
"""Or a model that knows no JSON fills it with white space until its tokens run out."""

CODEX: Any = [
    {"type": "function", "name": "exec", "parameters": {"type": "object"}, "strict": False},
    {"type": "namespace", "name": "mcp__games", "description": "Games.",
     "tools": [{"type": "function", "name": "move", "parameters": SCHEMA, "strict": True}]},
    {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": {"type": "text"}},
    {"type": "web_search", "external_web_access": True},
    {"type": "local_shell"},
]  # fmt: skip


def claude(gateway: GatewayProcess, opened: dict[str, Any]) -> anthropic.Anthropic:
    """Anthropic's clients add `/v1` themselves. The client is closed when the test ends."""
    base_url = opened["base_url"].removesuffix("/v1")
    return closed_after_test(anthropic.Anthropic(base_url=base_url, api_key=opened["api_key"], max_retries=0))
