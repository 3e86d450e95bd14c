"""A stand-in for a judge model: a program that speaks OpenAI's chat protocol and scores attempts by rules.

It gets what a judge model would get, RULER's prompt, and reads no more than that: the question, the queries, their
results and the answers. It knows neither the database nor the right answer. A judge model needs no such rules; this
one makes the example run without a network and at no cost.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from examples.database.shop import QUESTIONS

_BLOCK = re.compile(r"^=+ BEGIN (\w{16}) (context|trajectory (\w+)) =+$\n(.*?)^=+ END \1 \2 =+$", re.M | re.S)
_QUESTION = re.compile(rf"({'|'.join(QUESTIONS.values())}) for (\w+) from (\w+)\?")
_TURN = re.compile(r"^\[(assistant|tool)\] (.*?)(?=^\[(?:assistant|tool)\] |\Z)", re.M | re.S)
_QUERY = re.compile(r"\(calls query\) (.*)", re.S)


def score(question: re.Match[str], attempt: str) -> float:
    """What one attempt is worth, from 0 to 1.

    Each right part of the last query that worked earns something, and so does an answer that repeats its result; most
    is for all of them together. Every call beyond those that are needed costs a little."""
    asked, item, city = question.groups()
    function = next(name for name, text in QUESTIONS.items() if text == asked)
    turns = _TURN.findall(attempt)
    sql = result = ""
    for (_, call), (role, output) in itertools.pairwise(turns):
        found = _QUERY.match(call)
        if found and role == "tool" and not output.startswith("Error"):
            sql, result = found.group(1), output.strip()
    if not sql:
        return 0.0
    parts = [f"{function}(" in sql, f"'{item}'" in sql, f"'{city}'" in sql]
    numbers = re.findall(r"-?\d+", turns[-1][1]) if turns[-1][0] == "assistant" else []
    repeats = numbers[-1:] == [result]
    calls = sum(role == "tool" for role, _ in turns)
    wasted = max(calls - (1 if function == "count" else 2), 0)
    worth = 0.15 * sum(parts) + 0.15 * repeats + 0.4 * (all(parts) and repeats) - 0.05 * wasted
    return round(max(worth, 0.0), 3)


def judge(messages: list[dict[str, Any]]) -> str:
    """Return the reply to RULER's prompt: a score for each attempt in it."""
    prompt = "\n".join(str(m["content"]) for m in messages if m["role"] == "user")
    blocks = [(m.group(3), m.group(4)) for m in _BLOCK.finditer(prompt)]
    # What all attempts begin with is shown once, in the context: the question, and sometimes the first calls.
    context = "".join(text for name, text in blocks if name is None)
    question = _QUESTION.search(context)
    if question is None:
        raise ValueError("the prompt holds no question about the shop")
    scores = [
        {"id": name, "score": score(question, context + text), "explanation": "by the rules of the stand-in"}
        for name, text in blocks
        if name is not None
    ]
    return json.dumps({"scores": scores})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        try:
            status, answer = 200, _completion(request["model"], judge(request["messages"]))
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


def _completion(model: str, text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-stand-in", "object": "chat.completion", "created": 0, "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }  # fmt: skip


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Serve on a free port while the block runs, and yield the URL for `judge.api_base`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()
