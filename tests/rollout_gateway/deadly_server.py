"""An inference server that some requests kill: a process of its own that ends where a message says so.

`die`: ends at once, with all connections. `die slowly`: as vLLM does whose engine died: answers every call in flight
with a 500, then ends. `hold`: answers once a `release` has come."""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

from tests.rollout_gateway.fake_vllm import FakeVllm


class DeadlyServer(FakeVllm):
    def __init__(self, port: int) -> None:
        super().__init__()
        self.port, self.life = port, os.getpid()
        self.dying = asyncio.Event()
        self.released = asyncio.Event()

    async def before(self, path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        said = str(body.get("messages", ""))
        if "die slowly" in said:
            self.fail_with = 500
            self.dying.set()
        elif "die" in said:
            os._exit(1)
        elif "hold" in said:
            waits = [asyncio.ensure_future(e.wait()) for e in (self.dying, self.released)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        elif "release" in said:
            self.released.set()
        if path == "/health" and self.fail_with:
            os._exit(1)


async def main(port: int) -> None:
    server = DeadlyServer(port)
    await server.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    asyncio.run(main(parser.parse_args().port))
