"""Stand-ins for models: programs that speak OpenAI's chat protocol and answer by an example's rules.

A stand-in gets what a model would get, such as RULER's prompt, and reads no more than that. A model needs no such
rules; a stand-in makes an example run without a network and at no cost.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Score = Callable[[str, str], float]
"""Takes what all attempts have in common (the task, and sometimes the first calls) and one attempt, as RULER shows
them. Returns the score of the attempt, from 0 to 1. Raises `ValueError` if these are no attempts at its task."""

_SCORE_KEY = re.compile(r'"(score_\w+)"')
_BLOCK = re.compile(r"^=+ BEGIN (\w{16}) (context|trajectory (\w+)) =+$\n(.*?)^=+ END \1 \2 =+$", re.M | re.S)


def judge(messages: list[dict[str, Any]], score: Score) -> str:
    """Return the reply to RULER's prompt: a score for each attempt in it."""
    prompt = "\n".join(str(m["content"]) for m in messages if m["role"] == "user")
    blocks = [(m.group(3), m.group(4)) for m in _BLOCK.finditer(prompt)]
    keys = [m.group(1) for m in _SCORE_KEY.finditer(str(messages[0]["content"]))]
    context = "".join(text for name, text in blocks if name is None)
    scores = [
        {"id": name, "explanation": "by the rules of the stand-in", keys[-1]: score(context, text)}
        for name, text in blocks
        if name is not None
    ]
    if not scores:
        raise ValueError("the prompt holds no attempts at a task")
    return json.dumps({"scores": scores})


def _completion(request: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the chat completion for a request. Four characters count as a token."""
    prompt = sum(len(str(m.get("content", ""))) for m in request["messages"])
    usage = {"prompt_tokens": prompt // 4, "completion_tokens": len(text) // 4}
    message = {"role": "assistant", "content": text, "refusal": None}
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": 0,
        "model": request["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": usage | {"total_tokens": sum(usage.values())},
    }


@contextlib.contextmanager
def judging(score: Score) -> Iterator[dict[str, Any]]:
    """Serve a stand-in for the judge model while the block runs, and yield its settings."""
    with serving(lambda messages: judge(messages, score)) as url:
        yield {"judge.model": "openai/stand-in", "judge.api_base": url}


@contextlib.contextmanager
def serving(reply: Callable[[list[dict[str, Any]]], str], key: str = "") -> Iterator[str]:
    """Serve chat completions on a free port while the block runs, and yield the base URL. `reply` returns the answer to
    the messages of a request, or raises `ValueError` to refuse it. With `key`, callers without it are refused."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, answer = 401, {"error": {"message": "wrong key", "type": "authentication_error"}}
            if not key or self.headers["authorization"] == f"Bearer {key}":
                try:
                    status, answer = 200, _completion(request, reply(request["messages"]))
                except ValueError as error:
                    status, answer = 400, {"error": {"message": str(error), "type": "invalid_request_error"}}
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()
