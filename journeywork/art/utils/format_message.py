"""A message as text for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def format_message(message: Mapping[str, Any]) -> str:
    """Return role and content of a chat message, and the calls of tools that it holds."""
    content = message.get("content")
    if not isinstance(content, str):
        parts = content or []
        content = "\n".join(part.get("text") or json.dumps(part, ensure_ascii=False) for part in parts)
    lines = [f"{message['role']}:", content] if content else [f"{message['role']}:"]
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        lines.append(f"calls {function.get('name')}({function.get('arguments')})")
    return "\n".join(lines)
