"""A small scoring server behind OpenAI's HTTP API: stands in for a judge model in tests, benchmarks and demos.

It is no language model. It reads the judge's prompt the way an obedient model would and answers in the shape asked for:
text inside the nonce fences is data, everything else is instruction. A trajectory is worth the last `quality=<0..1>` in
its own text; without one, a hash of that text decides. It can be told to favour the first place, to obey instructions
that it finds outside the fences, and to take its time.

Asked about calls, it gives one the last `quality=<-1..1>` of what followed its reply; without one, 1 after thanks and
-1 after an objection. What stands behind `should have ` there is its hint.

    python -m tests.kits.scoring_server --port 8400 --delay-ms 50
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream

Request = dict[str, Any]
Answer = str | int
"""The reply's text, or an HTTP status to fail with."""

_QUALITY = re.compile(r"quality=(-?\d(?:\.\d+)?)")
_VOTES = (("thanks", 1.0), ("exit code 0", 1.0), ("no,", -1.0), ("error", -1.0))
_HINT = re.compile(r"should have ([^\n]+)")
_NONCE = re.compile(r"BEGIN ([0-9a-f]{16}) (?:trajectory|call) ([0-9a-z]+)")
_SCORE_KEY = re.compile(r'"(score_\w+)"')
_HINT_KEY = re.compile(r'"(hint_\w+)"')
_TURN_TOKEN = re.compile(r"<\|(?:im_start|start_header_id|system|start)\|>|\[INST\]|<<SYS>>|<start_of_turn>")
_ORDER = re.compile(
    r"(?:give|award|score|rate|assign|set)\b[^.\n]{0,80}?\b(?:1\.0|1|100|10/10|maximum|highest|full marks)", re.I
)


@dataclass
class Scorer:
    """How the server judges."""

    first_bonus: float = 0.0
    """Added to the trajectory shown first."""
    obedient: bool = False
    """Give 1.0 to the trajectory that text outside a fence asks to favour."""

    def __call__(self, request: Request) -> Answer:
        messages = request["messages"]
        prompt = "\n".join(str(m["content"]) for m in messages if m["role"] == "user")
        nonce = next((m.group(1) for m in _NONCE.finditer(prompt)), "")
        hint_key = _HINT_KEY.search(str(messages[0]["content"]))
        shown = {name: text.rpartition(f"----- {nonce} followed -----")[2] for name, text in blocks(prompt, nonce)}
        value = _vote if hint_key else _worth
        scores = {name: value(text) for name, text in shown.items()}
        if self.first_bonus and scores:
            scores[next(iter(scores))] += self.first_bonus
        if self.obedient:
            for name in favoured(prompt, nonce, list(scores)):
                scores[name] = 1.0
        key = score_key(request)
        entries = [{"id": n, "explanation": f"quality {s:.2f}", key: s} for n, s in scores.items()]
        if hint_key:
            entries = [{**entry, hint_key[1]: _hint(shown[str(entry["id"])])} for entry in entries]
        return json.dumps({"scores": entries})


def _worth(text: str) -> float:
    found = _QUALITY.findall(text)
    return float(found[-1]) if found else hashlib.sha256(text.encode()).digest()[0] / 255


def _vote(followed: str) -> float:
    found = [float(q) for q in _QUALITY.findall(followed)]
    return (found or [v for word, v in _VOTES if word in followed.lower()] or [0.0])[-1]


def _hint(followed: str) -> str:
    found = _HINT.search(followed)
    return found[1] if found else ""


def score_key(request: Request) -> str:
    """The key under which a prompt asks for scores: the last that its first message names."""
    return str(["score", *_SCORE_KEY.findall(str(request["messages"][0]["content"]))][-1])


def _fence(nonce: str) -> re.Pattern[str]:
    return re.compile(rf"^=+ BEGIN {nonce} (\w+) ?(\w*) =+$\n(.*?)^=+ END {nonce} \1 ?\2 =+$", re.M | re.S)


def blocks(prompt: str, nonce: str) -> list[tuple[str, str]]:
    """Id and text of each fenced trajectory, in the order shown."""
    return [(m.group(2), m.group(3)) for m in _fence(nonce).finditer(prompt) if m.group(1) in ("trajectory", "call")]


def favoured(prompt: str, nonce: str, ids: list[str]) -> list[str]:
    """Ids that instructions outside the fences ask to favour. A chat template's turn token counts as outside wherever
    it stands, because a tokenizer reads it before any fence."""
    out = []
    for block in _fence(nonce).finditer(prompt):
        turn = _TURN_TOKEN.search(block.group(3))
        if turn is not None and _ORDER.search(block.group(3), turn.end()):
            out.append(block.group(2))
    before = ids[0] if ids else ""
    last = 0
    for match in [*_fence(nonce).finditer(prompt), None]:
        outside = prompt[last : match.start() if match is not None else len(prompt)]
        if _ORDER.search(outside) is not None:
            named = [i for i in ids if re.search(rf"\b{i}\b", outside)]
            out += named or [before]
        if match is not None:
            before, last = match.group(2) or before, match.end()
    return [name for name in out if name in ids]


@dataclass
class ScoringServer:
    """`POST /v1/chat/completions`, `GET /v1/models`, `GET /health` on a free port (or `port`)."""

    answer: Callable[[Request], Answer | bytes] = field(default_factory=Scorer)
    """Bytes are the whole body of an answer with the status 200."""
    delay_s: float = 0.0
    refusal: str = "told to fail"
    """The message of an error answer."""
    port: int = 0
    finish_reason: str = "stop"
    requests: list[Request] = field(default_factory=list)
    """The requests, newest last; only if `keep` is set."""
    headers: list[dict[str, str]] = field(default_factory=list)
    """Headers of the same requests, with lower-case names."""
    keep: bool = False
    calls: int = 0
    now: int = 0
    """Requests in flight."""
    most: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @asynccontextmanager
    async def run(self) -> AsyncIterator[ScoringServer]:
        """Serve until the block ends."""
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=self.port)
        self.port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with listener, anyio.create_task_group() as tg:
            tg.start_soon(listener.serve, self._serve)
            yield self
            tg.cancel_scope.cancel()

    async def _serve(self, connection: anyio.abc.SocketStream) -> None:
        stream = BufferedByteReceiveStream(connection)
        async with connection:
            with contextlib.suppress(anyio.IncompleteRead, anyio.BrokenResourceError):  # the client went away
                while True:
                    head = (await stream.receive_until(b"\r\n\r\n", 65536)).decode("latin-1")
                    line, *fields = head.split("\r\n")
                    headers = {k.strip().lower(): v.strip() for k, _, v in (f.partition(":") for f in fields)}
                    body = await stream.receive_exactly(int(headers.get("content-length", "0")))
                    method, path, _ = line.split(" ", 2)
                    status, answer = await self._answer(method, path, headers, body)
                    payload = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}"
                    await connection.send(head.encode() + b"\r\n\r\n" + payload)

    async def _answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, Any] | bytes]:
        if method == "GET":
            models = [{"id": "scorer", "object": "model"}]
            return 200, {"object": "list", "data": models, "calls": self.calls, "most_at_once": self.most}
        if not path.partition("?")[0].endswith("/chat/completions"):
            return 404, _error(f"no {path} here")
        request = json.loads(body)
        self.calls += 1
        if self.keep:
            self.requests.append(request)
            self.headers.append(headers)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await anyio.sleep(self.delay_s)  # the latency that a model would have
            text = self.answer(request)
        finally:
            self.now -= 1
        if isinstance(text, int):
            return text, _error(self.refusal)
        if isinstance(text, bytes):
            return 200, text
        prompt, reply = sum(len(str(m["content"])) for m in request["messages"]) // 4, len(text) // 4
        usage = {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": self.finish_reason, "message": message}
        head = {"id": f"chatcmpl-{self.calls}", "object": "chat.completion", "created": 0, "model": request["model"]}
        return 200, {**head, "choices": [choice], "usage": usage}


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": None}}


def main() -> None:
    """Serve until interrupted; prints the address as one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m tests.kits.scoring_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    args = parser.parse_args()

    async def serve() -> None:
        server = ScoringServer(delay_s=args.delay_ms / 1000, port=args.port)
        async with server.run():
            print(json.dumps({"url": server.url}), flush=True)  # noqa: T201 - the answer of the command
            await anyio.sleep_forever()

    anyio.run(serve)


if __name__ == "__main__":
    main()
