"""Recording evaluations, and what a run's calls cost."""

from typing import Any

import httpx
import pytest

from pipeline.events import ExchangeRecorded, PolicyEvaluated, TrajectoryCompleted, unpack_ids
from pipeline.log.broker import Broker
from tests.rollout_gateway.conftest import PROJECT, GatewayProcess
from tests.rollout_gateway.kit import ASK, error

pytestmark = pytest.mark.inference

RESULT: dict[str, Any] = {
    "evaluation": "e-1",
    "entrant": "tictactoe@0",
    "model": "tictactoe",
    "version": "tictactoe@0",
    "measures": [{"name": "reward", "mean": 0.5, "low": 0.25, "high": 0.75, "count": 1}],
    "tasks": [{"task": "a", "reward": 0.5, "metrics": {"win": 1.0}, "trajectories": ["t-1"]}],
    "runs": 1,
}


def post(gateway: GatewayProcess, **more: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/evaluations", json=RESULT | more)


async def test_an_evaluation_is_recorded_once(gateway: GatewayProcess, broker: Broker) -> None:
    for _ in range(2):
        reply = post(gateway)
        assert (reply.status_code, reply.json()) == (201, {"evaluation": "e-1", "position": 0})
    assert error(post(gateway, runs=2)) == (409, "request_exists")
    assert post(gateway, position=1, kind="external", model="litellm:a/b", version="").status_code == 201
    events = [r.event for r in await broker.read(PolicyEvaluated, project=PROJECT)]
    assert [(e.position, e.kind, e.model) for e in events] == [
        (0, "policy", "tictactoe"),
        (1, "external", "litellm:a/b"),
    ]
    assert (events[0].measures[0].high, events[0].tasks[0].metrics) == (0.75, {"win": 1.0})


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "other"}, 404, "model_not_found"),
    ({"at": 1}, 400, "invalid_body"),
    ({"measures": [{"name": "reward"}]}, 400, "invalid_body"),
    ({"evaluation": ""}, 400, "invalid_name"),
    ({"measures": [{"name": "re\nward", "mean": 0.5}]}, 400, "invalid_name"),
    ({"measures": [{"name": "reward", "mean": 1e300}]}, 400, "invalid_body"),
    ({"tasks": [{"task": "a", "metrics": {"m": 1e308}}]}, 400, "invalid_body"),
    *(
        ({"version": v}, 400, "invalid_name")
        for v in ("x", "tictactoe@" + "9" * 26, "tictactoe@1", "chess@0", "tictactoe@01")
    ),
]


def test_what_is_no_evaluation_is_refused(gateway: GatewayProcess) -> None:
    replies = [(more, post(gateway, **more)) for more, _, _ in REFUSED]
    found = [(more, reply.status_code, reply.json().get("error", {}).get("code", "")) for more, reply in replies]
    assert found == REFUSED


async def test_a_completed_run_tells_its_tokens_and_seconds(gateway: GatewayProcess, broker: Broker) -> None:
    opened = gateway.open()
    agent = gateway.agent(opened)
    agent.chat.completions.create(**ASK)
    agent.chat.completions.create(**ASK, n=2)
    told = gateway.complete(opened["id"], reward=1.0).json()
    exchanges = [r.event for r in await broker.read(ExchangeRecorded, project=PROJECT)]
    (completed,) = [r.event for r in await broker.read(TrajectoryCompleted, project=PROJECT)]
    first = [e for e in exchanges if e.choice == 0]
    assert (len(exchanges), len(first)) == (3, 2)
    prompt = sum(len(unpack_ids(e.prompt_ids)) for e in first)
    sampled = sum(len(unpack_ids(e.sampled_ids)) for e in exchanges)
    seconds = sum(e.at - e.started_at for e in first) / 1e6
    assert (completed.prompt_tokens, completed.sampled_tokens) == (prompt, sampled)
    assert completed.calls_s == pytest.approx(seconds)
    assert [told[name] for name in ("calls", "prompt_tokens", "sampled_tokens")] == [2, prompt, sampled]
