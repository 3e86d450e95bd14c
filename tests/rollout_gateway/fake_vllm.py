"""A scriptable inference server."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec


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
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As a kill: every connection is reset. Returns once all are closed and nothing serves them any more."""
        assert self._server is not None
        # Nothing is accepted any more, and what just was begins: asyncio leaks a connection that begins after `close`.
        asyncio.get_running_loop().remove_reader(self._server.sockets[0].fileno())
        for _ in range(3):
            await asyncio.sleep(0)
        self._server.close()
        self._server = None
        serving = list(self._connections.values())
        for writer, task in self._connections.items():
            writer.transport.abort()
            task.cancel()  # it may wait for `held`
        await asyncio.gather(*serving, return_exceptions=True)
        self.life += 1
        self.loaded.clear()

    async def called(self, calls: int) -> None:
        """Wait until it has got so many chat completions."""
        async with asyncio.timeout(60):
            while len(self.calls) < calls:
                self._called.clear()
                await self._called.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # the connection came with the end
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections[writer] = task
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                _, path, _ = head.split(b" ", 2)
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                body = msgspec.json.decode(await reader.readexactly(length) if length else b"{}")
                await self.before(path.decode(), body)
                if self.drop_next and path.startswith(b"/v1/chat"):
                    self.drop_next = False
                    return
                status, answer = await self._answer(path.decode(), body)
                data = answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(data), data))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            try:
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
            finally:
                del self._connections[writer]  # `stop` ends what is closing too

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
