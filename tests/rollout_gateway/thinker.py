"""A scripted model that thinks before each step with a tool. Its chat template shows it the thoughts since the user's
last message, as those of Qwen3 and gpt-oss do. A byte is a token."""

import json
import math
import re
import uuid
from typing import Any

from tests.rollout_gateway.fake_vllm import FakeVllm

END = "<|end|>"
OPENING = "<|assistant|>"


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """The prompt. vLLM hands a message's `reasoning`, or `reasoning_content`, to the template."""
    last = _last_user(messages)
    out = f"<|tools|>{json.dumps(tools)}" if tools else ""
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            out += OPENING + "".join(text for _, text in pieces(message, thoughts=number > last))
        else:
            out += f"<|{message['role']}|>{_text(message['content'])}{END}"
    return out + OPENING


def _last_user(messages: list[dict[str, Any]]) -> int:
    return max((i for i, m in enumerate(messages) if m["role"] == "user"), default=0)


def pieces(message: dict[str, Any], *, thoughts: bool = True) -> list[tuple[str, str]]:
    """A message of the assistant as it is sampled: the kind of each piece, and its text."""
    thought = (message.get("reasoning") or message.get("reasoning_content")) if thoughts else ""
    out = [("reasoning", f"<think>{thought}</think>")] if thought else []
    out += [("content", _text(message["content"]))] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]  # vLLM parses them, the template writes them again
        function = {"name": call["function"]["name"], "arguments": json.loads(arguments)}
        out.append(("tool_calls", f"<tool_call>{json.dumps(function)}</tool_call>"))
    return [*out, ("", END)]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


class Thinker(FakeVllm):
    """Takes `steps` steps with the tool whose name ends with `move` after each message of the user, then answers."""

    def __init__(self, steps: int = 0) -> None:
        super().__init__()
        self.steps = steps

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        since = body["messages"][_last_user(body["messages"]) :]
        taken = sum(c["function"]["name"].endswith("move") for m in since for c in m.get("tool_calls") or ())
        said: dict[str, Any] = {"role": "assistant", "reasoning": f"Thought {taken}: é…", "content": None}
        if taken == self.steps or not (name := self._tool(body)):
            return {**said, "content": "Done."}
        search = {"query": "select:mcp__games__move"}
        arguments = search if name == "ToolSearch" else {"cell": ("a1", "b2")[taken % 2]}
        calls = [_call(name, **arguments)]
        return {**said, "content": f"Step {taken}." if taken % 3 == 0 else None, "tool_calls": calls}

    def _tool(self, body: dict[str, Any]) -> str:
        """The tool `move`, or the one by which Claude Code has the model find it."""
        tools = [tool["function"]["name"] for tool in body.get("tools") or ()]
        results = [_text(message["content"]) for message in body["messages"] if message["role"] == "tool"]
        found = re.findall(r"\b\w*move\b", " ".join([*tools, *results]))
        return next(iter([*found, *(name for name in tools if name == "ToolSearch"), ""]))

    async def _answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path != "/v1/chat/completions":
            return await super()._answer(path, body)
        message, prompt = self.reply(body), list(render(body["messages"], body.get("tools")).encode())
        said = [(kind, list(text.encode())) for kind, text in pieces(message)]
        sampled = [token for _, ids in said for token in ids]
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled), "total_tokens": len(prompt + sampled)}
        head = {"id": f"chatcmpl-{body['request_id']}", "created": 1, "model": body["model"]}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason, **_tokens(sampled)}
            return 200, {**head, "choices": [choice], "prompt_token_ids": prompt, "usage": usage}
        chunks: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": prompt}
        ]
        calls = enumerate(message.get("tool_calls") or ())
        for kind, ids in said:
            delta: dict[str, Any] = {kind: message[kind]} if kind in ("reasoning", "content") else {}
            if kind == "tool_calls":
                number, call = next(calls)
                delta = {kind: [{"index": number, **call}]}
            chunks.append({"choices": [{"index": 0, "delta": delta, **_tokens(ids)}]})
        chunks[-1]["choices"][0]["finish_reason"] = reason
        chunks.append({"choices": [], "usage": usage})
        events = [f"data: {json.dumps({**head, 'object': 'chat.completion.chunk', **chunk})}\n\n" for chunk in chunks]
        return 200, "".join([*events, "data: [DONE]\n\n"]).encode()


class Delegator(Thinker):
    """Starts two of Claude Code's agents, which run a command each, and writes summaries."""

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        spoken = [m for m in body["messages"] if m["role"] != "system"]
        asked, new = _text(spoken[_last_user(spoken)]["content"]), uuid.uuid4().hex
        said: dict[str, Any] = {"role": "assistant", "reasoning": "Hm.", "content": f"This is what came of it: {new}."}
        if "<summary>" in asked:
            return {**said, "content": f"<summary>\nThe parser was mended in three places, see {new}.\n</summary>"}
        if spoken[-1]["role"] != "user":
            return said
        if "Delegate" in asked:
            task = f"Look for the cause of the failure {new} and report what you find"
            told = {"description": "look", "subagent_type": "general-purpose", "run_in_background": False}
            calls = [_call("Agent", prompt=f"{task}, {number}.", **told) for number in range(2)]
            return {**said, "content": None, "tool_calls": calls}
        if "Look for" in asked:
            return {**said, "content": None, "tool_calls": [_call("Bash", command="echo a", description="say")]}
        return said


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _tokens(ids: list[int]) -> dict[str, Any]:
    return {"token_ids": ids, "logprobs": {"content": [{"logprob": -math.log(2)} for _ in ids]}}
