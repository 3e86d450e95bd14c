"""A teacher from outside: what it is asked, what its answers become, and what happens without one."""

import math
import signal as signals
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from judge.commands.rejudge import Rejudge
from judge.teacher import Teacher, TeacherError, open_teacher, parse_logprobs
from pipeline import streams
from pipeline.config import Config, ConfigError, ModelConfig, NatsConfig, save
from pipeline.events import (
    DeadLettered,
    ExchangeRecorded,
    GroupScored,
    TeacherAnswered,
    TrajectoryCompleted,
    unpack_ids,
    unpack_logprobs,
)
from pipeline.log.broker import Broker
from tests.conftest import VllmServer
from tests.judge.kit import groups, judging
from tests.kits.crash.processes import fork_server
from tests.kits.events import exchange
from tests.kits.inference_double import Double
from tests.kits.quick_service import quick_consumers
from tests.kits.settings import with_values

BASE = str(VllmServer.base)
TEACHER = "tictactoe@0"
FIRST, SECOND, OTHER = ([5, 6, 9], [7, 8]), ([5, 6, 9, 7, 8, 4], [3, 2, 11]), ([8, 1], [12])
"""Calls of a run, prompt and reply: the second continues the first, the third does not."""


def settings(nats: NatsConfig, url: str, *, top_k: int = 0, base: str = BASE, **changes: Any) -> Config:
    distill = {"trainer.distill.divergence": "reverse_kl", "trainer.distill.top_k": top_k} if top_k else {}
    return with_values(
        Config(project="p", nats=nats, models=(ModelConfig(name="m", base=base),)),
        {
            "judge.min_size": 1,
            "trainer.distill.weight": 1.0,
            "trainer.distill.teacher": "outside",
            "teacher.url": f"{url}/v1",
            "teacher.model": TEACHER,
            "teacher.retries": 0,
            **distill,
            **changes,
        },
    )


def calls(name: str, *turns: tuple[list[int], list[int]], **fields: Any) -> list[ExchangeRecorded]:
    return [exchange(name, seq, prompt, reply, **fields) for seq, (prompt, reply) in enumerate(turns)]


async def play(broker: Broker, name: str, **ended: Any) -> None:
    for event in calls(name, FIRST, SECOND, OTHER):
        await broker.publish(event)
    run = {"reward": None, "group": name, "group_size": 1, "exchanges": 3} | ended
    await broker.publish(TrajectoryCompleted(project="p", trajectory=name, model="m", **run))


async def answers(broker: Broker) -> list[TeacherAnswered]:
    return [r.event for r in await broker.read(TeacherAnswered)]


@pytest.mark.parametrize("top_k", [0, 4])
async def test_answers_are_on_the_log_before_the_group_that_names_them(
    broker: Broker, nats_config: NatsConfig, inference_double: VllmServer, top_k: int
) -> None:
    """Each sampled token has the teacher's logprob after all tokens before it. No reward is needed; validation runs
    are not taught."""
    async with judging(broker, settings(nats_config, inference_double.url, top_k=top_k)):
        await play(broker, "a")
        await play(broker, "v", split="val", reward=1.0)
        found = {g.group: g.members[0] for g in await groups(broker, 2)}
    (answer,) = await answers(broker)
    assert (found["a"].teacher, found["a"].reward, found["a"].outcome) == (TEACHER, 0.0, "scored")
    assert (found["v"].teacher, found["v"].reward) == ("", 1.0)
    assert (answer.trajectory, answer.teacher, answer.requests, answer.tokens) == ("a", TEACHER, 2, 12)
    double = Double(VllmServer.base, TEACHER)
    expected = [
        (token, double.logprobs_after(TEACHER, [*prompt, *reply[:at]]))
        for prompt, reply in (FIRST, SECOND, OTHER)
        for at, token in enumerate(reply)
    ]
    np.testing.assert_allclose(unpack_logprobs(answer.logprobs), [p[t] for t, p in expected], rtol=1e-6)
    best = [sorted(range(len(p)), key=lambda i: -p[i])[:top_k] for _, p in expected]
    assert unpack_ids(answer.top_ids).tolist() == [i for of_token in best for i in of_token]
    tops = [p[i] for (_, p), of_token in zip(expected, best, strict=True) for i in of_token]
    np.testing.assert_allclose(unpack_logprobs(answer.top_logprobs), tops, rtol=1e-6)


async def test_only_the_run_s_own_calls_that_the_teacher_would_have_sampled_are_asked_about(
    nats_config: NatsConfig, inference_double: VllmServer
) -> None:
    """Regression: the logprobs of temperature 1 taught a policy that sampled at 0.7."""
    picture = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    seen = msgspec.json.encode({"messages": [{"role": "user", "content": [picture]}]})
    async with (
        Broker.connect(nats_config) as broker,
        open_teacher(settings(nats_config, inference_double.url), broker) as teacher,
    ):
        assert teacher is not None
        first, second = calls("a", FIRST, SECOND)
        beside = msgspec.structs.replace(calls("a", OTHER)[0], seq=2, side_call=True)
        answer = await teacher._answer("m", [second, first, first, second, beside])
        assert (answer.requests, len(unpack_logprobs(answer.logprobs))) == (1, 5)
        for request, why in ((seen, "images"), (b'{"temperature": 0.7}', r"sampled at temperature 0\.7")):
            with pytest.raises(TeacherError, match=why):
                await teacher._answer("m", [msgspec.structs.replace(first, request=request)])


@pytest.mark.parametrize(
    "changes",
    [
        {"teacher.url": "http://127.0.0.1:1/v1"},
        {"teacher.model": "unknown"},
        {"teacher.max_tokens": 11},
        {"teacher.wait_s": 1e-9},
    ],
)
async def test_without_an_answer_a_run_trains_with_its_reward_alone(
    broker: Broker, nats_config: NatsConfig, inference_double: VllmServer, changes: dict[str, Any]
) -> None:
    """And a run without a reward is discarded. The judge starts, and scores, while the teacher is down."""
    async with judging(broker, settings(nats_config, inference_double.url, **changes)):
        await play(broker, "rewarded", reward=0.5)
        await play(broker, "plain")
        ((scored,), (discarded,)) = await groups(broker, 1), await groups(broker, 1, "discarded")
    assert await answers(broker) == []
    assert [(m.trajectory, m.reward, m.teacher) for m in scored.members] == [("rewarded", 0.5, "")]
    assert (discarded.group, discarded.reason) == ("plain", "too_small")


async def test_history_is_taught_later(broker: Broker, nats_config: NatsConfig, inference_double: VllmServer) -> None:
    """Groups that were published while the teacher was down, and runs that were discarded then. A run keeps
    the answer that it has."""
    config = settings(nats_config, inference_double.url)
    async with judging(broker, with_values(config, {"teacher.model": "unknown"})):
        await play(broker, "rewarded", reward=0.5)
        await play(broker, "plain")
        await groups(broker, 1)
        await groups(broker, 1, "discarded")
    for branch in ("one", "two"):
        async with open_teacher(config, broker) as teacher:
            report = await Rejudge(broker, config, None, teacher, branch=branch).run()
        assert (report.rejudged, report.rescued) == (2, 1)
    assert sorted(a.trajectory for a in await answers(broker)) == ["plain", "rewarded"]
    taught = [m for g in await groups(broker, 5) if g.branch != "main" for m in g.members]
    assert [(m.teacher, m.outcome) for m in taught] == [(TEACHER, "scored")] * 4


@asynccontextmanager
async def answering(config: Config, *replies: httpx.Response | Exception) -> AsyncIterator[Teacher]:
    """A teacher whose server gives these replies; the last one for ever."""
    left = list(replies)

    def reply(_: httpx.Request) -> httpx.Response:
        given = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(given, Exception):
            raise given
        return given

    async with httpx.AsyncClient(transport=httpx.MockTransport(reply)) as client:
        yield Teacher(config, None, client)  # type: ignore[arg-type] # it is asked, and publishes nothing


@pytest.mark.parametrize(
    ("first", "retried"), [(503, True), (429, True), (400, False), (401, False), (httpx.ReadTimeout(""), True)], ids=str
)
async def test_only_failures_that_may_pass_are_tried_again(first: int | Exception, retried: bool) -> None:
    failure = httpx.Response(first) if isinstance(first, int) else first
    config = settings(NatsConfig(), "http://teacher", **{"teacher.retries": 1})
    async with answering(config, failure, httpx.Response(200, json=[1])) as teacher:
        if retried:
            assert await teacher._post("http://teacher/x", {}) == [1]
        else:
            with pytest.raises(TeacherError, match=str(first) or "ReadTimeout"):
                await teacher._post("http://teacher/x", {})


def entry(**logprobs: Any) -> dict[str, Any]:
    return {name[1:]: {"logprob": value} for name, value in logprobs.items()}


@pytest.mark.parametrize(
    "said",
    [
        None,
        3,
        {"a": 1},
        {"5": 1.0},
        entry(_5=None),
        entry(_6=-1.0, _7=-2.0),
        entry(_5=-1.0),
        entry(_5=0.5, _6=-1.0),
        entry(_5=math.nan, _6=-1.0),
        entry(_5=-1.0, _99=-1.0),
    ],
    ids=str,
)
def test_an_answer_that_is_not_vllms_is_none(said: Any) -> None:
    with pytest.raises(TeacherError):
        parse_logprobs([said], np.array([5], np.int32), 2, 20)


def test_a_logprob_is_bounded_and_padding_is_left_out() -> None:
    """vLLM writes -9999 for a probability of 0."""
    said = entry(_5=-9999.0, _6=-1.0, _19=-2.0, _20=-0.5)
    logprobs, ids, tops = parse_logprobs([said], np.array([5], np.int32), 2, 20)
    assert (logprobs.tolist(), ids.tolist(), tops.tolist()) == ([-50.0], [[6, 19]], [[-1.0, -2.0]])


async def test_another_tokenizer_is_refused_with_the_text_where_it_differs(
    broker: Broker, nats_config: NatsConfig, inference_double: VllmServer, tmp_path: Path
) -> None:
    """Two tokens of the base have changed places."""
    own = Tokenizer.from_file(f"{BASE}/tokenizer.json")
    ids = [own.token_to_id(word) for word in ("b1", "c1")]
    changed = msgspec.json.decode(Path(f"{BASE}/tokenizer.json").read_bytes())
    for token in changed["added_tokens"]:
        if token["id"] in ids:
            token["id"] = sum(ids) - token["id"]
    changed["added_tokens"].sort(key=lambda token: token["id"])
    (tmp_path / "tokenizer.json").write_bytes(msgspec.json.encode(changed))
    config = settings(nats_config, inference_double.url, base=str(tmp_path))
    with pytest.raises(ConfigError, match=r"tokens [0-9]+ to [0-9]+: 'c1.*' here and 'b1.*' there"):
        async with open_teacher(config, broker):
            pass


POINTS = ("judge.teacher_answered", "broker.after_publish")
"""tests/test_crash.py has the other points."""
RUNS = 4


@pytest.mark.timeout(300)
@pytest.mark.slow
async def test_each_run_is_taught_once_whenever_a_judge_dies(
    nats_config: NatsConfig, inference_double: VllmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "CONSUMERS", quick_consumers(0.5, endless=True))
    config = settings(nats_config, inference_double.url, top_k=2, run_dir=str(tmp_path))
    save(config, tmp_path / "judge.toml")
    names = [f"{point.replace('.', '-')}-{number}" for point in POINTS for number in range(RUNS)]
    async with Broker.connect(msgspec.structs.replace(nats_config, provision=True)) as broker:
        async with fork_server(tmp_path / "judge.toml", "judge", "tokenizers", ack_wait_s=0.5) as server:
            for index, point in enumerate(POINTS):
                dying = server.start("judge", f"{point}:2")
                for name in names[index * RUNS : (index + 1) * RUNS]:
                    await play(broker, name)
                with anyio.fail_after(60):
                    await dying.ended.wait()
                assert dying.status == -signals.SIGKILL, point
                heir = server.start("judge")
                with anyio.fail_after(60):
                    while len(await broker.read(GroupScored)) < RUNS * (index + 1) or await broker.lag("judge"):
                        await anyio.sleep(0.05)
                await heir.end(signals.SIGKILL)
        scored = [r.event for r in await broker.read(GroupScored)]
        assert Counter(a.trajectory for a in await answers(broker)) == Counter(names)
        assert await broker.read(DeadLettered) == []
    assert Counter(m.trajectory for g in scored for m in g.members) == Counter(names)
    assert {m.teacher for g in scored for m in g.members} == {TEACHER}
