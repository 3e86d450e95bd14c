"""A provider for the example: a program that speaks chat completions, has a key, and counts tokens for its bill.

    MASTER_KEY=… python -m examples.apprentice.master

It prints its URL and serves until its standard input ends. It reads the messages of the inbox by their sentences, so it
gets what a model would get, and no more. In 5 % of the messages, by their hash, it names a wrong team.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from examples.inbox.messages import PROBLEMS, URGENCIES, Split

WRONG_SHARE = 0.05
NAME = "scripted-1"


def _sentences(table: dict[str, dict[Split, list[str]]]) -> dict[str, str]:
    return {sentence: name for name, splits in table.items() for texts in splits.values() for sentence in texts}


_TEAM, _URGENCY = _sentences(PROBLEMS), _sentences(URGENCIES)


def answer(text: str) -> str:
    """Return what the master answers to a message."""
    team, urgency = (next((name for s, name in table.items() if s in text), "") for table in (_TEAM, _URGENCY))
    drawn = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32
    if drawn < WRONG_SHARE:
        team = next(name for name in sorted(PROBLEMS) if name != team)
    order = re.search(r"\b\d{4}\b", text)
    fields = {"team": team, "urgency": urgency, "order": int(order[0]) if order else None}
    return json.dumps(fields, separators=(",", ":"))


def completion(request: dict[str, Any]) -> dict[str, Any]:
    """Return the chat completion for a request. Four characters count as a token."""
    said = answer(str(request["messages"][-1]["content"]))
    sent = sum(len(str(message["content"])) for message in request["messages"]) // 4
    message = {"role": "assistant", "content": said, "refusal": None}
    usage = {"prompt_tokens": sent, "completion_tokens": len(said) // 4, "total_tokens": sent + len(said) // 4}
    identity = {"id": "chatcmpl-" + os.urandom(12).hex(), "object": "chat.completion", "created": 0, "model": NAME}
    return {**identity, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        status, reply = 401, dict[str, Any](error={"message": "wrong key", "type": "authentication_error"})
        if self.headers["authorization"] == f"Bearer {os.environ['MASTER_KEY']}":
            status, reply = 200, completion(request)
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def main() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
        sys.stdin.read()
        server.shutdown()


if __name__ == "__main__":
    main()
