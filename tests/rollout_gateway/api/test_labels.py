"""People's labels of a group: recorded once, refused where they cannot mean anything."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pipeline.config import NatsConfig
from pipeline.events import GroupLabeled
from pipeline.log.broker import Broker
from tests.rollout_gateway.conftest import GatewayProcess

pytestmark = [pytest.mark.anyio, pytest.mark.inference]


async def test_labels_are_recorded_once(gateway: GatewayProcess, nats_config: NatsConfig) -> None:
    for name in ("a", "b"):
        gateway.open(id=name, group="g/1")
    gateway.open(id="c", group="g2")

    def label(group: str = "g%2F1", **body: Any) -> httpx.Response:
        return httpx.post(f"{gateway.url}/v1/groups/{group}/label", json=body)

    scores = [{"trajectory": "a", "score": 1, "comment": "right"}, {"trajectory": "b", "score": 0.25}]
    for _ in range(2):
        answer = label(labels=scores, by="me", source="dashboard", request="r1")
        assert answer.json() == {"group": "g/1", "by": "me", "request": "r1"}
    other = label(labels=scores[:1], by="me", source="dashboard", request="r1")
    assert (other.status_code, other.json()["error"]["code"]) == (409, "request_exists")
    refused = {
        "nobody": (404, [{"trajectory": "nobody", "score": 1}]),
        "of another group": (400, [{"trajectory": "c", "score": 1}]),
        "twice": (400, [scores[0], scores[0]]),
        "out of range": (400, [{"trajectory": "a", "score": 1.5}]),
        "none": (400, []),
        "misspelt": (400, [{"trajectory": "a", "scores": 1}]),
    }
    for what, (status, labels) in refused.items():
        assert label(labels=labels).status_code == status, what
    for field in ("by", "source", "request"):
        long = label(labels=scores, **{field: "x" * 201})
        assert (long.status_code, long.json()["error"]["param"]) == (400, field)
    async with Broker.connect(nats_config) as broker:
        events = [recorded.event for recorded in await broker.read(GroupLabeled)]
    assert [(e.group, e.model, e.by, e.source) for e in events] == [("g/1", "tictactoe", "me", "dashboard")]
    assert [(x.trajectory, x.score, x.comment) for x in events[0].labels] == [
        ("a", 1.0, "right"),
        ("b", 0.25, ""),
    ]
