"""Feedback from agent code and from other programs, and from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import numpy as np
import openai
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from journeywork import AsyncJourneywork, Journeywork, JourneyworkError, langfuse_scores
from journeywork.feedback_file import main
from journeywork.trajectory import Trajectory, answer_id
from pipeline.config import NatsConfig
from tests.rollout_gateway.api.test_feedback import signals
from tests.rollout_gateway.conftest import GatewayProcess, StartGateway, start_front
from tests.rollout_gateway.kit import ASK

pytestmark = [pytest.mark.anyio]

__all__ = ["start_front"]  # a fixture


async def test_agents_reward_their_calls(gateway: GatewayProcess) -> None:
    """In a coroutine, in a plain function that `gather` calls, and in blocking code."""

    def blocking(run: Trajectory, task: int) -> float:
        with openai.OpenAI(**run.openai) as agent:
            answer = agent.chat.completions.create(**ASK)
        run.reward_call(answer, np.float32(0.5))
        return 1.0

    async def play(run: Trajectory, task: int) -> float:
        async with openai.AsyncOpenAI(**run.openai) as agent:
            answer = await agent.chat.completions.create(**ASK)
        await run.reward_call({"id": answer.id}, 0.5)
        return 1.0

    def by_hand() -> None:
        with Journeywork(gateway.url) as client, client.trajectory("tictactoe") as run:
            with openai.OpenAI(**run.openai) as agent:
                agent.chat.completions.create(**ASK)
            run.reward_call(0, 0.5)
            run.feedback(text="of the run")

    async with AsyncJourneywork(gateway.url) as client:
        for rollout in (play, blocking):
            (group,) = await client.gather("tictactoe", [1], rollout, group_size=1)
            assert not group.exceptions
        await anyio.to_thread.run_sync(by_hand)
        given = await signals(gateway.config.nats)
        assert [(s.call, s.value, s.text) for s in given] == [(0, 0.5, "")] * 3 + [(-1, None, "of the run")]
        later = await client.feedback(trajectory=given[0].trajectory, thumb="down", key="k")
        assert later["signals"][0]["run"] == "completed"
        await client.feedback(ranking=[given[0].trajectory, given[-1].trajectory])
        with pytest.raises(JourneyworkError, match="other contents") as refused:
            await client.feedback(trajectory=given[0].trajectory, thumb="up", key="k")
        assert (refused.value.status, refused.value.code) == (409, "request_exists")
    assert len(await signals(gateway.config.nats)) == 7


def test_what_is_no_answer_is_refused() -> None:
    for wrong in (None, True, 1.5, object(), {}):
        with pytest.raises(TypeError, match="is no answer"):
            answer_id(wrong)
    with pytest.raises(RuntimeError, match="no client opened"):
        Trajectory("t", "m", "g", "http://gateway", "k").feedback(thumb="up")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
async def test_each_row_of_a_file_is_given_once(
    start_front: StartGateway, nats_config: NatsConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    gateway = start_front()
    for name in ("a", "b"):
        gateway.open(id=name)
    rows: list[dict[str, Any]] = [
        {"trajectory": "a", "value": 4.0, "scale": [1, 5], "name": "stars"},
        {"trajectory": "b", "thumb": "up", "text": "yes, please"},
        {"ranking": ["a", "b"]},
        {"trajectory": "a", "call": "7", "thumb": "up"},
        {"trajectory": "nobody", "thumb": "up"},
        {"answer": "chatcmpl-5f1c", "thumb": "sideways"},
        {"thumb": "up"},
        {"ranking": ["b", "a"], "about": "run", "name": "by run"},
        {"trajectory": "a", "role": "nobody", "thumb": "up"},
    ]
    names = ["trajectory", "answer", "about", "call", "role", "name", "value", "scale", "thumb", "ranking", "text"]
    file = tmp_path / f"given.{kind}"
    if kind == "csv":
        cells = [
            [json.dumps(row[n]) if isinstance(row.get(n), list) else row.get(n, "") for n in names] for row in rows
        ]
        quoted = [",".join('"' + str(cell).replace('"', '""') + '"' for cell in line) for line in [names, *cells]]
        file.write_text("\n".join(quoted))
    else:
        pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), file)
    told = []
    for _ in range(2):
        assert await anyio.to_thread.run_sync(main, [str(file), "--url", gateway.url, "--json"]) == 1
        told.append(json.loads(capsys.readouterr().out))
    assert [(report["given"], report["repeated"]) for report in told] == [(4, 0), (0, 4)]
    assert [refusal["row"] for refusal in told[0]["refused"]] == [4, 5, 6, 7, 9]
    refused = [refusal["error"] for refusal in told[0]["refused"]]
    assert "has 0 calls" in refused[0]
    assert "Send the id of a run" in refused[1]
    assert "It is one of down, up." in refused[2] or "It is one of up, down." in refused[2]
    assert "names no `trajectory`" in refused[3]
    assert "nobody" in refused[4]
    given = {(s.trajectory, s.name, s.value, s.text, s.source) for s in await signals(nats_config)}
    assert given == {
        ("a", "stars", 0.75, "", "file"),
        ("b", "feedback", 1.0, "yes, please", "file"),
        ("a", "feedback", 1.0, "", "file"),
        ("b", "feedback", 0.0, "", "file"),
        ("b", "by run", 1.0, "", "file"),
        ("a", "by run", 0.0, "", "file"),
    }


class _Langfuse:
    """The API of Langfuse, as far as people's scores are read."""

    def __init__(self) -> None:
        numbers = {"minValue": 1, "maxValue": 5}
        categories = {"categories": [{"label": "bad", "value": 0}, {"label": "good", "value": 2}]}
        self.configs = {"stars": numbers, "words": categories}
        self.scores = [
            self.score("quality", 0.5, comment="well"),
            self.score("stars", 4, configId="stars"),
            self.score("words", "good", "CATEGORICAL", configId="words"),
            self.score("ok", True, "BOOLEAN"),
            self.score("fix", "b2", "CORRECTION", subject={"kind": "observation", "id": "call-0", "traceId": "t"}),
            self.score("gone", "other", "CATEGORICAL", configId="words"),
            self.score("session", 1, subject={"kind": "session", "id": "s"}),
            self.score("foreign", 1, subject={"kind": "trace", "id": "other"}),
        ]

    @staticmethod
    def score(name: str, value: Any, kind: str = "NUMERIC", **more: Any) -> dict[str, Any]:
        subject = {"kind": "trace", "id": "t"}
        return {"id": f"s-{name}", "name": name, "value": value, "dataType": kind, "subject": subject, **more}

    def answer(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"].startswith("Basic ")
        asked = dict(request.url.params)
        match request.url.path.removeprefix("/api/public/").split("/"):
            case ["v3", "scores"]:
                begin = int(asked.get("cursor", 0))
                more = {"cursor": str(begin + 3)} if begin + 3 < len(self.scores) else {}
                return httpx.Response(200, json={"data": self.scores[begin : begin + 3], "meta": more})
            case ["v2", "observations"]:
                run = {"id": "run", "metadata": {"trajectory": "a"}}
                call = {"id": "call-0", "metadata": {"trajectory": "a", "seq": 0}}
                return httpx.Response(200, json={"data": [run, call] if asked["traceId"] == "t" else [], "meta": {}})
            case ["score-configs", name]:
                return httpx.Response(200, json=self.configs[name])
        return httpx.Response(404)


def test_peoples_scores_in_langfuse_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    langfuse = _Langfuse()
    for name in ("BASE_URL", "PUBLIC_KEY", "SECRET_KEY"):
        monkeypatch.setenv(f"LANGFUSE_{name}", "http://langfuse")
    transport = httpx.MockTransport(langfuse.answer)
    client = httpx.Client
    monkeypatch.setattr(langfuse_scores.httpx, "Client", lambda **options: client(**options, transport=transport))
    given = {row["name"]: row for row in langfuse_scores.rows(7)}
    keys = [row.pop("key") for row in given.values()]
    about = {"trajectory": "a", "source": "langfuse"}
    assert given == {
        "quality": {**about, "name": "quality", "value": 0.5, "text": "well"},
        "stars": {**about, "name": "stars", "value": 4.0, "scale": [1, 5]},
        "words": {**about, "name": "words", "value": 2.0, "scale": [0, 2]},
        "ok": {**about, "name": "ok", "value": 1.0},
        "fix": {**about, "name": "fix", "call": "0", "correction": "b2"},
    }
    langfuse.scores[0]["value"] = 0.75
    again = [row["key"] for row in langfuse_scores.rows(7)]
    assert [before == after for before, after in zip(keys, again, strict=True)] == [False, True, True, True, True]
    monkeypatch.delenv("LANGFUSE_SECRET_KEY")
    with pytest.raises(ValueError, match="set LANGFUSE_BASE_URL"):
        next(langfuse_scores.rows(7))
