"""A scriptable inference server."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from tests.rollout_gateway.http_server import serving


class FakeVllm:
    """Speaks as much of vLLM's HTTP as the gateway uses. What it does can be set: fail, hold, forget."""

    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}
        self.calls: list[str] = []
        self._called = asyncio.Event()
        self.fail_with = 0
        self.disk: Path | None = None
        """If set, adapters are found in this folder only."""
        self.drop_next = False
        self.held: asyncio.Event | None = None
        """If set, chat completions wait for it."""
        self.loading: asyncio.Event | None = None
        """If set, loading an adapter waits for it."""
        self.life = 1
        self._serving = AsyncExitStack()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.port = await self._serving.enter_async_context(serving(self._serve, self.port))

    async def stop(self) -> None:
        """As a kill: every connection ends, and what is under way gets no answer after 10 ms."""
        await self._serving.aclose()
        self.life += 1
        self.loaded.clear()

    async def called(self, calls: int) -> None:
        """Wait until it has got so many chat completions."""
        async with asyncio.timeout(60):
            while len(self.calls) < calls:
                self._called.clear()
                await self._called.wait()

    async def _serve(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read() or b"{}")
        await self.before(request.path, body)
        if self.drop_next and request.path.startswith("/v1/chat"):
            self.drop_next = False
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        status, answer = await self._answer(request.path, body)
        return web.Response(status=status, body=answer if isinstance(answer, bytes) else msgspec.json.encode(answer))

    async def before(self, path: str, body: Any) -> None:
        """Called with each request before it is answered."""

    async def _answer(self, path: str, body: Any) -> tuple[int, Any]:
        match path:
            case "/health":
                return 200, {}
            case "/metrics":
                return 200, b"process_start_time_seconds %d\n" % self.life
            case "/v1/models":
                cards = [{"id": k, "root": v, "parent": "tictactoe@0"} for k, v in self.loaded.items()]
                return 200, {"data": [{"id": "tictactoe@0", "root": "x", "parent": None}, *cards]}
            case "/v1/load_lora_adapter":
                if self.loading is not None:
                    await self.loading.wait()
                if self.disk is not None and not Path(body["lora_path"]).is_relative_to(self.disk):
                    return 404, {"error": {"message": "no such folder"}}
                self.loaded[body["lora_name"]] = body["lora_path"]
                return 200, {}
            case "/v1/unload_lora_adapter":
                self.loaded.pop(body["lora_name"], None)
                return 200, {}
            case "/v1/completions":
                value = -1.0 if body["model"].endswith("@0") else -2.0
                choice = {"logprobs": {"top_logprobs": [{"token_id:1": value}]}}
                return 200, {"choices": [{"index": i, **choice} for i in range(4)]}
            case "/v1/chat/completions":
                self.calls.append(body["model"])
                self._called.set()
                if self.held is not None:
                    await self.held.wait()
                if self.fail_with:
                    return self.fail_with, {"error": {"message": "broken", "type": "x"}}
                if not body["model"].endswith("@0") and body["model"] not in self.loaded:
                    return 404, {"error": {"message": "no such model", "type": "NotFoundError"}}
                content = Path(self.loaded.get(body["model"], "hi")).name  # what the reply was made with
                message = {"role": "assistant", "content": content}
                logprobs = {"content": [{"logprob": -0.5}]}
                choice = {
                    "index": 0,
                    "message": message,
                    "finish_reason": "stop",
                    "token_ids": [7],
                    "logprobs": logprobs,
                }
                return 200, {"id": "c", "model": body["model"], "choices": [choice], "prompt_token_ids": [1, 2]}
        return 404, {}
