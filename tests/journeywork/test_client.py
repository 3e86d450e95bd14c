"""The SDK against a real gateway."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import anyio.to_thread
import httpx
import openai
import pytest

import journeywork.client as client_module
import journeywork.transport as transport_module
from journeywork import AsyncJourneywork, GatewayUnavailableError, Journeywork, JourneyworkError
from tests.rollout_gateway.conftest import GatewayProcess
from tests.rollout_gateway.kit import ASK


async def test_a_run_from_open_to_complete(gateway: GatewayProcess) -> None:
    with Journeywork(gateway.url) as jw:
        with jw.trajectory("tictactoe", group="g", task="play") as run:
            with openai.OpenAI(**run.openai) as agent:
                agent.chat.completions.create(**ASK)
            run.reward = 0.25
        got = jw.get(run.id)
        assert (got["status"], got["reward"], got["exchanges"], got["task"]) == ("completed", 0.25, 1, "play")
        assert jw.policies()[0]["version"] == "tictactoe@0"
        with pytest.raises(JourneyworkError) as refused:
            jw.complete(run.id, reward=1.0)
        assert (refused.value.status, refused.value.code) == (409, "trajectory_completed")


async def test_calls_wait_for_a_gateway_that_restarts(gateway: GatewayProcess) -> None:
    async with AsyncJourneywork(gateway.url) as jw:
        run = await jw.open("tictactoe")
        gateway.kill()
        async with anyio.create_task_group() as tg:
            tg.start_soon(jw.complete, run.id)
            await anyio.to_thread.run_sync(gateway.start)
        assert (await jw.get(run.id))["status"] == "completed"


@pytest.mark.parametrize("client", [Journeywork, AsyncJourneywork])
def test_a_url_without_a_scheme_fails_at_once(client: type[Journeywork] | type[AsyncJourneywork]) -> None:
    """httpx reports such a URL as a transport error, which would be retried for `wait_s`."""
    for url, said in (
        ("localhost:8000", r"'localhost:8000' must begin with http:// or https://: write 'http://localhost:8000'"),
        ("ftp://gateway", "must begin with http:// or https://$"),
        ("http://", "'http://' names no host"),
        ("http://:8000", "names no host"),
        ("http://localhost:80a", "is not valid: Invalid port: '80a'"),
    ):
        with pytest.raises(ValueError, match=said):
            client(url)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that clients make, in seconds. Time passes in them only."""
    made: list[float] = []

    async def sleep(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr(transport_module.Backoff, "_warned", {})
    monkeypatch.setattr(transport_module, "time", SimpleNamespace(monotonic=lambda: sum(made)))
    monkeypatch.setattr(client_module, "time", SimpleNamespace(sleep=made.append))
    monkeypatch.setattr(client_module, "anyio", SimpleNamespace(sleep=sleep))
    return made


Answer = Callable[[httpx.Request], httpx.Response]


def blocking(answer: Answer, wait_s: float, url: str = "http://one") -> Journeywork:
    """A blocking client whose requests `answer` gets."""
    jw = Journeywork(url, wait_s=wait_s)
    jw._core._blocking_http = httpx.Client(base_url=jw.url, transport=httpx.MockTransport(answer))
    return jw


async def asked(answer: Answer, wait_s: float) -> list[dict[str, Any]]:
    """What an asynchronous client says of the policies when `answer` gets its requests."""
    async with AsyncJourneywork("http://two", wait_s=wait_s) as jw:
        await jw._http.aclose()
        jw._http = httpx.AsyncClient(base_url=jw.url, transport=httpx.MockTransport(answer))
        return await jw.policies()


async def test_an_unreachable_gateway_is_told_while_the_client_waits(
    pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    with blocking(refuse, 20) as jw, pytest.raises(GatewayUnavailableError) as caught:
        jw.policies()
    told = "the gateway http://one can't be reached (connection refused): check this address, and that the gateway runs"
    assert caplog.messages == [f"{told}; trying for 20 s more"]
    assert str(caught.value) == f"gave up after 20 s; last problem: {told}"
    with pytest.raises(GatewayUnavailableError):
        await asked(refuse, 80)
    assert len(caplog.messages) == 1 + 3


async def test_retry_after_is_honoured_and_the_last_problem_is_told(pauses: list[float]) -> None:
    def overloaded(_: httpx.Request) -> httpx.Response:
        return httpx.Response(503, text="x" * 1000, headers={"retry-after": "7"})

    message = rf"^gave up after 10 s; last problem: status 503: x{{{200}}}$"
    with blocking(overloaded, 10) as jw, pytest.raises(GatewayUnavailableError, match=message):
        jw.policies()
    assert pauses[:2] == [7.0, 3.0]
    pauses.clear()
    with pytest.raises(GatewayUnavailableError, match=message):
        await asked(overloaded, 10)
    assert pauses[:2] == [7.0, 3.0]


def test_a_group_waits_for_the_trainer_longer_than_for_a_gateway(pauses: list[float]) -> None:
    error = {"error": {"code": "groups_ahead", "message": "24 groups wait for training"}}
    answers = [httpx.Response(429, json=error, headers={"retry-after": "1"}) for _ in range(49)]
    answers.append(httpx.Response(200, json={"data": []}))
    with blocking(lambda _: answers.pop(0), 10) as jw:
        assert jw.policies() == []
    assert sum(pauses) > 40


def test_both_clients_have_the_same_methods() -> None:
    public = [{name for name in vars(c) if not name.startswith("_")} for c in (AsyncJourneywork, Journeywork)]
    assert public[0] - {"aclose"} == public[1] - {"close"}
