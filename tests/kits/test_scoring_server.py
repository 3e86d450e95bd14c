"""The scoring server itself, over HTTP and as a command."""

from __future__ import annotations

import json
import subprocess
import sys

import httpx
import pytest

from tests.kits.scoring_server import Scorer, ScoringServer

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.anyio
async def test_the_scoring_server_speaks_http_and_names_what_it_is_told_to() -> None:
    async with ScoringServer(Scorer()).run() as server, httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/models")).json()["data"][0]["id"] == "scorer"
        assert (await client.post("/embeddings", json={})).status_code == 404
        reply = await client.post("/chat/completions", json={"model": "m", "messages": HELLO})
        assert json.loads(reply.json()["choices"][0]["message"]["content"]) == {"scores": []}


def test_the_scoring_server_s_command_serves_at_the_address_it_prints() -> None:
    command = [sys.executable, "-m", "tests.kits.scoring_server", "--delay-ms", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        body = {"model": "m", "messages": HELLO}
        assert httpx.post(f"{url}/chat/completions", json=body).status_code == 200
        process.terminate()
