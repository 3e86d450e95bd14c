"""Between an agent that can't set them and the gateway: the tool that a model must call, and how it samples.

A call whose last message is the user's must call a tool; one that ends with a tool's result must not. A demo model of
0.8 M parameters would call no tool by itself, and ramble on.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_SAID: Any = {"name": "said", "strict": True, "schema": {"type": "string", "enum": ["a1 is mine", "b2 is mine"]}}
"""What it may say: a model of 1,024 positions hardly finds an end after thousands."""


def forced(path: str, body: dict[str, Any], tool: str, bias: dict[str, int]) -> dict[str, Any]:
    """The request with what it must do. `tool`: the end of the tool's name."""
    responses = path.endswith("/responses")
    turns = body["input"] if responses else body["messages"]
    answered = turns[-1].get("role") == "tool" or str(turns[-1].get("type")).endswith("_output")
    name = tool if responses else _name(body.get("tools") or [], tool)
    named: Any = {"type": "function", "name": name} if responses else {"type": "function", "function": {"name": name}}
    out = {**body, "logit_bias": bias, "temperature": 1.0}
    if answered and responses:
        out["text"] = {"format": {"type": "json_schema", **_SAID}}
    elif answered:
        out["response_format"] = {"type": "json_schema", "json_schema": _SAID}
    out["max_output_tokens" if responses else "max_tokens"] = 120
    for function in _functions(out.get("tools") or []):
        function["strict"] = True  # or the grammar knows no schema
    if name:
        out["tool_choice"] = "none" if answered else named
    return out


def _functions(tools: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for tool in tools:
        yield from _functions(tool.get("tools") or [])
        if tool["type"] == "function":
            yield tool.get("function", tool)


def _name(tools: list[dict[str, Any]], end: str) -> str:
    return next((str(t["function"]["name"]) for t in tools if t["function"]["name"].endswith(end)), "")


@contextlib.contextmanager
def forcing(url: str, tool: str, bias: dict[str, int]) -> Iterator[str]:
    """The URL to give to the agent in place of `url`."""
    there = urlsplit(url)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            sent = json.loads(self.rfile.read(int(self.headers["content-length"])))
            data = json.dumps(forced(self.path, sent, tool, bias)).encode()
            headers = {k: v for k, v in self.headers.items() if k.lower() not in ("content-length", "host")}
            self._pass("POST", data, headers)

        def do_GET(self) -> None:
            self._pass("GET", b"", {})

        def _pass(self, method: str, data: bytes, headers: dict[str, str]) -> None:
            connection = http.client.HTTPConnection(there.hostname or "", there.port, timeout=120)
            try:
                connection.request(method, self.path, data, headers)
                reply = connection.getresponse()
                self.send_response(reply.status)
                self.send_header("content-type", reply.headers.get("content-type", ""))
                self.send_header("connection", "close")
                self.end_headers()
                while piece := reply.read1(65536):
                    self.wfile.write(piece)
                    self.wfile.flush()
            finally:
                connection.close()
                self.close_connection = True

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}{there.path}"
    finally:
        server.shutdown()
        server.server_close()
        serving.join(60)
