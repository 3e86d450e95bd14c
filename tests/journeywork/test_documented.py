"""The Python snippets of README.md, docs/sdk.md and docs/install.md run, against a gateway before the inference
double."""

import ast
import contextlib
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio.to_thread
import openai
import pytest

import journeywork
from tests.kits.clients import closed_after_test
from tests.rollout_gateway.conftest import GatewayProcess

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/sdk.md", "docs/install.md")


def snippets(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)


def adapted(snippet: str, url: str) -> str:
    """The snippet for the test's gateway: its address, its model, and the only version that it has."""
    return re.sub(r"support@\d+", "tictactoe@0", snippet.replace("http://127.0.0.1:8700", url)).replace(
        '"support"', '"tictactoe"'
    )


def names(run: str, **more: Any) -> dict[str, Any]:
    """The names that a snippet expects to exist; `run` keeps the groups of different snippets apart."""
    tasks = [
        SimpleNamespace(
            id=f"{run}-{number}",
            messages=[{"role": "user", "content": f"a1={'.xo'[number]}"}],
            score=lambda reply: float(len(reply.choices[0].message.content)),
        )
        for number in range(2)
    ]
    return {
        "Journeywork": journeywork.Journeywork,
        "AsyncJourneywork": journeywork.AsyncJourneywork,
        "OpenAI": openai.OpenAI,
        "AsyncOpenAI": openai.AsyncOpenAI,
        "loop": journeywork.loop,
        "LoopOptions": journeywork.LoopOptions,
        "scenarios": tasks,
        "tasks": tasks,
        "held_out": tasks,
        "task": tasks[0],
        "epoch": 0,
        "ticket": SimpleNamespace(text="the display is cracked", seconds=3.0),
        "answer": lambda ticket, client: client.close(),
        "__name__": "__main__",
        **more,
    }


async def run(code: str, scope: dict[str, Any]) -> None:
    """Run a snippet, which may use `async with` at its top. A snippet without it blocks, so it gets a thread."""
    compiled = compile(code, "<snippet>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if compiled.co_flags & 0x80:  # a coroutine: inspect.CO_COROUTINE
        await eval(compiled, scope)
    else:
        await anyio.to_thread.run_sync(eval, compiled, scope)


async def close_clients(scope: dict[str, Any]) -> None:
    """Close the other clients that a snippet left open: collected later, their sockets fail the test that runs then."""
    for client in scope.values():
        if isinstance(client, journeywork.Journeywork):
            client.close()
        elif isinstance(client, openai.AsyncOpenAI):
            await client.close()
        elif isinstance(client, journeywork.AsyncJourneywork):
            await client.aclose()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.slow
async def test_the_snippets_of_a_page_run(page: str, gateway: GatewayProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    make = openai.OpenAI
    monkeypatch.setattr(openai, "OpenAI", lambda **options: closed_after_test(make(**options)))
    found = [adapted(text, gateway.url) for text in snippets(page)]
    assert found
    assert not any("8700" in text or "support" in text for text in found)
    printed = io.StringIO()
    with journeywork.Journeywork(gateway.url) as client, contextlib.redirect_stdout(printed):
        scope = names(page.replace("/", "-"), client=client)
        for number, text in enumerate(found):
            for task in scope["tasks"]:
                task.id = f"{page.replace('/', '-')}-{number}-{task.id[-1]}"
            scope["client"] = client  # the name of an asynchronous client in the snippet before
            try:
                await run(text, scope)
            finally:
                await close_clients({name: value for name, value in scope.items() if value is not client})
    if page == "docs/sdk.md":
        assert len(scope["groups"]) == 2
        assert all(len(group.rewards) == 8 for group in scope["groups"])
        assert " over 2" in printed.getvalue()
