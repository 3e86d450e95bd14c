"""What Claude Code sends to `/v1/messages` and Codex CLI to `/v1/responses`, but for the model."""

from typing import Any

PARAMETERS = {"type": "object", "properties": {"cmd": {"type": "string"}}}
BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1f3a9;"}
SYSTEM = {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}}
HELLO = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
REMINDER = {"role": "system", "content": [{"type": "text", "text": "The date is today."}]}
TOOL = {"name": "Bash", "description": "Runs.", "input_schema": PARAMETERS}
ADDED = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": TOOL | {"name": "Grep"}}}
REMOVED = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "Bash"}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"cmd": "ls"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "a.py"}]}


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


CLAUDE_CODE: dict[str, dict[str, Any]] = {
    "first turn": {"system": [BILLING, SYSTEM], "messages": [HELLO]},
    "only the attribution": {"system": [BILLING], "messages": [HELLO]},
    "inline system": {"system": [BILLING, SYSTEM], "messages": [HELLO, REMINDER]},
    "inline system without system": {"messages": [HELLO, said(text("Hi")), REMINDER, HELLO]},
    "inline attribution": {"messages": [{"role": "system", "content": [BILLING]}, HELLO]},
    "tool use": {
        "system": [SYSTEM],
        "tools": [TOOL],
        "messages": [HELLO, said(text("See"), USE), {"role": "user", "content": [RESULT, text("go on")]}],
    },
    "null fields": {
        "system": None,
        "tools": [TOOL | {"description": None, "strict": None, "defer_loading": None}],
        "stop_sequences": None,
        "temperature": None,
        "stream": None,
        "output_config": {"format": None},
        "tool_choice": {"type": "auto", "name": None, "disable_parallel_tool_use": None},
        "messages": [{"role": "user", "content": [text("Hello") | {"id": None, "name": None, "thinking": None}]}],
    },
    "schema of unnamed type": {"tools": [{"name": "Bash", "input_schema": {}}], "messages": [HELLO]},
    "only thinking": {"messages": [HELLO, said({"type": "thinking", "thinking": "Well", "signature": ""}), HELLO]},
    "empty text": {"messages": [HELLO, said(text("")), HELLO]},
    "empty user": {"messages": [HELLO, said(text("Hi")), {"role": "user", "content": []}, HELLO]},
    "a form of answer": {
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "Bash"},
        "output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}},
        "messages": [HELLO],
    },
    "a tool is added": {
        "tools": [TOOL],
        "messages": [HELLO, said(text("Hi")), {"role": "system", "content": [ADDED, REMOVED]}, HELLO],
    },
}

FUNCTION = {"type": "function", "name": "shell", "parameters": PARAMETERS, "strict": False}
DEVELOPER = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be safe."}]}
ASKED = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
CALLED = {"type": "function_call", "call_id": "call_1", "name": "shell", "arguments": '{"cmd":"ls"}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "a.py"}


def answered(words: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": words, "annotations": []}]
    return {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": content}


def thought(words: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": words}]}


CODEX: dict[str, dict[str, Any]] = {
    "first turn": {"instructions": "You are Codex.", "input": [DEVELOPER, ASKED], "tools": [FUNCTION]},
    "developer later": {"instructions": "You are Codex.", "input": [ASKED, answered("Hi"), DEVELOPER, ASKED]},
    "developer alone": {"input": [DEVELOPER, ASKED]},
    "system first": {"input": [{"role": "system", "content": "Be safe."}, {"role": "user", "content": "Hello"}]},
    "tool use": {
        "instructions": "You are Codex.",
        "tools": [FUNCTION],
        "input": [DEVELOPER, ASKED, thought("Well"), answered("See"), CALLED, OUTPUT],
    },
    "text after a call": {"tools": [FUNCTION], "input": [ASKED, CALLED, answered("See"), OUTPUT]},
    "reasoning after text": {"input": [ASKED, answered("See"), thought("Well"), ASKED]},
    "reasoning alone": {"input": [ASKED, thought("Well"), ASKED]},
    "a form of answer": {
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "name": "shell"},
        "text": {"format": {"type": "text"}},
        "metadata": {"a": "b"},
        "input": "Hello",
    },
}
