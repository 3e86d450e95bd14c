"""What the cases share: the package under test, values that programs pass, and a model behind OpenAI's API."""

import asyncio
import importlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

NAME = os.environ.get("ART_UNDER_TEST", "journeywork.art")
"""`art`, to run the cases against openpipe-art itself (docs/art.md)."""
art: Any = importlib.import_module(NAME)


def part(path: str) -> Any:
    return importlib.import_module(f"{NAME}.{path}")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str | None, **fields: Any) -> Choice:
    message = ChatCompletionMessage(role="assistant", content=text, **fields)
    return Choice(finish_reason="stop", index=0, message=message)


CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": 1}'}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}


async def played(reward: float, delay_s: float = 0.0, **fields: Any) -> Any:
    await asyncio.sleep(delay_s)
    return art.Trajectory(reward=reward, **fields)


async def failed(message: str = "boom") -> Any:
    raise RuntimeError(message)


def gathered(groups: Any, **options: Any) -> Any:
    async def run() -> Any:
        made = groups() if callable(groups) else groups
        return await art.gather_trajectory_groups(made, **options)

    return asyncio.run(run())


def rewards(group: Any) -> list[float]:
    return sorted(trajectory.reward for trajectory in group)


class Server(BaseHTTPRequestHandler):
    """A model behind OpenAI's API: it says how many messages it was sent, or what `content` says."""

    content: Callable[[dict[str, Any]], str] | None = None
    requests: list[tuple[dict[str, str], dict[str, Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        cls = type(self)
        cls.requests.append(({k.lower(): v for k, v in self.headers.items()}, body))
        text = cls.content(body) if cls.content is not None else f"after {len(body['messages'])}"
        logprobs = {"content": [{"token": "a", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}
        self.send_response(200)
        if body.get("stream"):
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            top = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
            pieces = [
                {"index": 0, "delta": {"role": "assistant", "content": piece}, "logprobs": logprobs}
                for piece in (text[:3], text[3:])
            ]
            for choice in [*pieces, {"index": 0, "delta": {}, "finish_reason": "stop"}]:
                self.wfile.write(f"data: {json.dumps({**top, 'choices': [choice]})}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")
            return
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": "stop", "message": message, "logprobs": logprobs}
        top = {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        data = json.dumps({**top, "choices": [choice], "usage": usage}).encode()
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


class Served:
    def __init__(self, url: str, handler: type[Server]) -> None:
        self.url, self._handler = url, handler

    @property
    def requests(self) -> list[tuple[dict[str, str], dict[str, Any]]]:
        return self._handler.requests

    def says(self, content: Callable[[dict[str, Any]], str]) -> None:
        self._handler.content = staticmethod(content)


@pytest.fixture
def served() -> Iterator[Served]:
    handler = type("Handler", (Server,), {"requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield Served(f"http://127.0.0.1:{server.server_port}/v1", handler)
    server.shutdown()
    server.server_close()
