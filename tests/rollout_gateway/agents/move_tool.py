"""The tool that agents are given, as chat completions describe it."""

from typing import Any

MOVE: Any = {
    "type": "function",
    "function": {
        "name": "move",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"cell": {"type": "string", "enum": ["a1", "b2"]}},
            "required": ["cell"],
            "additionalProperties": False,
        },
    },
}
