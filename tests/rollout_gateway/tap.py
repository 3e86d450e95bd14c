"""A proxy that keeps the calls and replies which pass it, and may change the calls: between gateway and vLLM, whose
replies are compared with the record, or between an agent and the gateway."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from tests.rollout_gateway.http_server import served

_CALLS = ("/v1/chat/completions", "/v1/completions")

Body = dict[str, Any]


@dataclass(eq=False)
class Call:
    """A request to vLLM and its reply, as they were on the wire."""

    path: str
    request: dict[str, Any]
    status: int = 0
    body: bytes = b""
    whole: bool = False
    """The reply came to its end."""

    @property
    def streamed(self) -> bool:
        return bool(self.request.get("stream"))

    def _replies(self) -> list[dict[str, Any]]:
        if not self.streamed:
            return [json.loads(self.body)]
        events = [e[6:] for e in self.body.split(b"\n\n") if e.startswith(b"data: ")]
        return [json.loads(e) for e in events if e != b"[DONE]"]

    @property
    def models(self) -> set[str]:
        """What vLLM says it answered with."""
        return {r["model"] for r in self._replies() if "model" in r}

    @property
    def prompt_ids(self) -> list[int]:
        return next((r["prompt_token_ids"] for r in self._replies() if r.get("prompt_token_ids")), [])

    def sampled(self, choice: int = 0) -> tuple[list[int], list[float]]:
        """Token ids and logprobs of a choice of a chat completion."""
        ids: list[int] = []
        logprobs: list[float] = []
        for reply in self._replies():
            for said in reply.get("choices", ()):
                if said["index"] == choice:
                    ids += said.get("token_ids") or ()
                    entries = (said.get("logprobs") or {}).get("content") or ()
                    logprobs += [entry["logprob"] for entry in entries]
        return ids, logprobs


class Tap:
    """Listens on `url` and passes requests on to `upstream`. Use as `with tapped(url) as tap`."""

    def __init__(self, upstream: str, change: Callable[[Body], Body] | None = None) -> None:
        """`change`: returns the body that is sent in place of a posted one."""
        self._upstream, self._change, self.url = upstream, change, ""
        self.calls: list[Call] = []
        """Model calls, in the order in which they were sent."""

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        sent = await request.read()
        if self._change is not None and sent:
            sent = json.dumps(self._change(json.loads(sent))).encode()
        call = Call(request.path, json.loads(sent) if request.path in _CALLS else {})
        if request.path in _CALLS:
            self.calls.append(call)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length")}
        url = f"{self._upstream}{request.path_qs}"
        async with (
            aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(600)) as client,
            client.request(request.method, url, data=sent or None, headers=headers) as there,
        ):
            call.status = there.status
            reply = web.StreamResponse(status=there.status, headers={"content-type": there.content_type})
            await reply.prepare(request)
            # Seen before it is passed on: a test that has the end of a reply finds the call complete in `calls`.
            async for part in there.content.iter_any():
                call.body += part
                await reply.write(part)
            call.whole = True
            await reply.write_eof()
        return reply


@contextlib.contextmanager
def tapped(upstream: str, change: Callable[[Body], Body] | None = None) -> Iterator[Tap]:
    tap = Tap(upstream, change)
    with served(tap.pass_on) as tap.url:
        yield tap
