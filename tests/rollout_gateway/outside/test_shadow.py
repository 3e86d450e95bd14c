"""Shadow calls: both answers are on the log, nobody waits, agents come first, and a shadow is part of no run."""

import asyncio
import re
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from judge import service
from pipeline.config import Config, ConfigError, HealingConfig, JudgeConfig, ModelConfig, OutsideConfig
from pipeline.config.checks import check
from pipeline.events import (
    EVENTS,
    AnswersCompared,
    GroupScored,
    Hint,
    ShadowAnswered,
    SignalGiven,
    TrajectoryCompleted,
    unpack_ids,
    unpack_logprobs,
)
from pipeline.log.broker import Broker
from pipeline.log.subjects import subject_filter
from pipeline.names import is_name, split_point
from pipeline.streams import CONSUMERS
from rollout_gateway.dialects.calls import Answer, Raw, SampledChoice
from rollout_gateway.dialects.permitted import Permitted
from rollout_gateway.http.errors import ApiError
from rollout_gateway.http.upstream import UpstreamError
from rollout_gateway.outside import shadow
from rollout_gateway.outside.answers import UNREADABLE
from rollout_gateway.outside.requests import read_call
from rollout_gateway.outside.shadow import Shadows, apprentice_call, comparable_answer
from rollout_gateway.serving.replicas import Fleet
from tests.conftest import free_port
from tests.judge.kit import IMPORTS_LITELLM
from tests.kits.scoring_server import ScoringServer
from tests.kits.waiting import until
from tests.rollout_gateway.conftest import PROJECT
from tests.rollout_gateway.kit import ASK, in_flight
from tests.rollout_gateway.outside.conftest import OpenShop, Shop
from tests.rollout_gateway.outside.provider import chunks, completion, stream, whole
from tests.rollout_gateway.outside.test_relay import CHAT

SHADOWED = {"shadow_percent": 100.0}


@pytest.fixture
async def shop(open_shop: OpenShop) -> Shop:
    shop = await open_shop(promote=False, publish=False, table_of=SHADOWED)
    shop.provider.says(whole(completion("hi")))
    return shop


async def ask(shop: Shop, text: str = "go", run: str = "r", **more: Any) -> httpx.Response:
    return await shop.call(run, **{"messages": [{"role": "user", "content": text}], **more})


async def shadows(shop: Shop, count: int) -> list[ShadowAnswered]:
    async def published() -> list[ShadowAnswered]:  # behind the agent's answer
        found = await shop.broker.read(ShadowAnswered, project=PROJECT)
        return [recorded.event for recorded in found] if len(found) >= count else []

    return await until(published)


async def counts(shop: Shop) -> dict[str, float]:
    lines = (await shop.client.get("/metrics")).text.splitlines()
    said = [line for line in lines if line.startswith("journeywork_shadows_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in said}


async def until_failed(shop: Shop) -> None:
    async def counted() -> float:
        return (await counts(shop)).get("failed", 0)

    await until(counted)


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
async def test_both_answers_are_on_the_log_and_the_shadow_is_part_of_no_run(shop: Shop, streamed: bool) -> None:
    shop.provider.says(stream(*chunks()) if streamed else whole(completion("hi ")))
    await shop.open("r")
    for text in ("first", "second"):
        assert (await ask(shop, text, stream=streamed, max_tokens=3, user="someone")).status_code == 200
    recorded = await shop.calls("r")
    answered = await shadows(shop, 2)
    assert [event.seq for event in recorded] == [0, 1]
    assert all(event.policy_version == "outside:master" for event in recorded)
    for event in answered:
        assert (event.model, event.policy_version, event.outside) == ("tictactoe", "tictactoe@0", "master")
        assert unpack_ids(event.sampled_ids).tolist() == [7]
        assert unpack_logprobs(event.logprobs).tolist() == [-0.5]
        assert msgspec.json.decode(event.response)["choices"][0]["message"]["content"] == "hi"
        assert event.same is not streamed
    assert {event.call for event in answered} == {0, 1}
    await shop.post("/v1/trajectories/r/complete", reward=1.0)
    (end,) = await shop.broker.read(TrajectoryCompleted, project=PROJECT)
    assert (end.event.exchanges, end.event.calls, end.event.sampled_tokens) == (2, 2, 0)


async def test_agent_waits_for_no_shadow_and_breaks_off_one_at_its_server(shop: Shop) -> None:
    shop.server.held = asyncio.Event()
    await shop.open("r")
    with anyio.fail_after(20):
        assert (await ask(shop)).status_code == 200
    await shop.server.called(1)
    await in_flight(shop.gateway, 1)
    await shop.open("policy", model="tictactoe")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(shop.call, "policy", **ASK))
        await shop.server.called(2)
        await in_flight(shop.gateway, 1)  # the shadow was broken off, and waits while the agent's call is under way
        assert (await counts(shop)).get("answered") is None
        assert len(shop.server.calls) == 2
        shop.server.held.set()
    (event,) = await shadows(shop, 1)
    assert event.call == 0
    assert len(shop.server.calls) == 3


async def test_shadow_that_its_server_refuses_is_counted(shop: Shop) -> None:
    shop.server.fail_with = 500
    await shop.open("r")
    assert (await ask(shop)).status_code == 200
    await until_failed(shop)
    assert "shadow call failed" in shop.gateway.log
    assert await shop.broker.read(ShadowAnswered, project=PROJECT) == []


async def test_a_shadow_call_that_ends_makes_room_for_the_next_while_another_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet()
    replica = fleet.add("http://h")
    replica.ready, replica.loaded = True, {"a@1": ""}
    some = made(100.0, fleet)
    router: Any = type("Router", (), {"newest_loaded": lambda self, model: "a@1"})()
    some._router = router
    begun = list[asyncio.Event]()

    async def answer(call: Any, lease: Any) -> Any:
        begun.append(end := asyncio.Event())
        await end.wait()
        raise UpstreamError("over")

    monkeypatch.setattr(some, "_answer", answer)
    at_once = some._tables["master"].shadow_calls
    for seq in range(at_once + 1):
        some.offer(recorded(seq))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(some.run)
        await anyio.wait_all_tasks_blocked()
        assert len(begun) == at_once > 1
        begun[0].set()
        await anyio.wait_all_tasks_blocked()
        assert len(begun) == at_once + 1
        tasks.cancel_scope.cancel()


async def test_a_gateway_that_stops_waits_for_no_shadow_call(shop: Shop) -> None:
    shop.server.held = asyncio.Event()
    await shop.open("r")
    for text in ("one", "two"):
        assert (await ask(shop, text)).status_code == 200
    await shop.server.called(2)
    with anyio.fail_after(30):
        await anyio.to_thread.run_sync(shop.gateway.stop)  # which ends with the exit status 0
    shop.server.held.set()
    assert await shop.broker.read(ShadowAnswered, project=PROJECT) == []


async def test_without_an_inference_server_agents_get_their_answers_and_shadow_calls_wait(open_shop: OpenShop) -> None:
    nobody = (f"http://127.0.0.1:{free_port()}",)
    shop = await open_shop(promote=False, publish=False, table_of=SHADOWED, urls=nobody)
    await shop.open("r")
    for number in range(3):
        assert (await ask(shop, f"call {number}")).status_code == 200
    assert await counts(shop) == {}
    assert await shop.broker.read(ShadowAnswered, project=PROJECT) == []


@pytest.mark.parametrize("calls", [5, ["x"], [{"function": "x"}]])
async def test_an_answer_of_the_provider_that_is_no_chat_completion_ends_no_gateway(shop: Shop, calls: Any) -> None:
    shop.provider.says(whole(completion("hi", tool_calls=calls)), whole(completion("hi")))
    await shop.open("r")
    assert (await ask(shop, "odd")).json()["choices"][0]["message"]["tool_calls"] == calls
    await until_failed(shop)
    assert (await ask(shop, "plain")).status_code == 200
    (event,) = await shadows(shop, 1)
    assert (event.call, event.same) == (1, True)


async def test_call_of_no_run_has_no_shadow(shop: Shop) -> None:
    await shop.post("/v1/chat/completions", model="master", messages=[])
    assert shop.server.calls == []


@IMPORTS_LITELLM
async def test_a_shadow_is_compared_and_a_low_run_is_healed_by_the_master(open_shop: OpenShop, broker: Broker) -> None:
    """Gateway, judge and log together. Each part alone has tests of its own."""
    shop = await open_shop(promote=False, publish=False, table_of={"may_train": True, **SHADOWED})
    shop.provider.says(whole(completion("quality=1.0")))
    async with ScoringServer().run() as scorer, anyio.create_task_group() as tasks:
        healing = HealingConfig(outside="master", url=shop.gateway.url)
        judge = JudgeConfig(model="openai/scorer", api_base=scorer.url, healing=healing, group_size=1, min_size=1)
        config = msgspec.structs.replace(shop.gateway.config, judge=judge)
        tasks.start_soon(service.serve, config, lambda **_: None)
        for model in ("master", "tictactoe"):
            await shop.open(model, model=model)
            assert (await shop.call(model, model=model)).status_code == 200
        await shop.post("/v1/trajectories/tictactoe/complete", reward=0.0)
        (scored,) = await until(partial(broker.read, GroupScored))

        async def both_compared() -> dict[str, AnswersCompared]:
            found = {r.event.trajectory: r.event for r in await broker.read(AnswersCompared)}
            return found if set(found) == {"master", "tictactoe"} else {}

        compared = await until(both_compared)
        tasks.cancel_scope.cancel()
    assert all(event.outside_score > event.apprentice_score for event in compared.values())
    (member,) = scored.event.members
    by = "outside:master"
    assert member.hints == (Hint(call=0, text="quality=1.0", kind="correction", by=by, version=by),)
    (signal,) = await broker.read(SignalGiven)
    assert (signal.event.trajectory, signal.event.kind) == ("tictactoe", "correction")


def made(percent: float, fleet: Any = None) -> Shadows:
    outside = OutsideConfig(name="master", url="http://h/v1", apprentice="a", shadow_percent=percent)
    idle: Any = type("Fleet", (), {"idle": asyncio.Event()})()
    router: Any = None
    return Shadows(Config(outside=(outside,)), fleet or idle, router, Permitted())


SILENT = Answer({}, b"", [])


def recorded(seq: int, body: bytes = b'{"model": "master", "messages": []}', said_by_master: Answer = SILENT) -> Any:
    call = read_call("/v1/chat/completions", body, {"master": [OutsideConfig(name="master", url="http://h/v1")]})
    run = type("Run", (), {"id": "run"})()
    return type("Exchange", (), {"call": call, "recorded_in": run, "seq": seq, "answer": said_by_master})()


async def test_queue_is_bounded_and_the_share_is_drawn_by_run_and_call(monkeypatch: pytest.MonkeyPatch) -> None:
    some = made(30.0)
    for seq in range(400):
        some.offer(recorded(seq))
    chosen = [shadow.seq for shadow in some._waiting["master"]]
    assert chosen == [seq for seq in range(400) if split_point(f"run/{seq}") < 30]
    assert 80 < len(chosen) < 160
    every = made(100.0)
    for seq in range(shadow._MAX_WAITING + 5):
        every.offer(recorded(seq))
    assert (len(every._waiting["master"]), every.counts["dropped"]) == (shadow._MAX_WAITING, 5)
    monkeypatch.setattr(shadow, "_MAX_WAIT_S", -1.0)
    assert every._next_turn("master") is None  # all of them have waited too long
    assert every.counts["dropped"] == 5 + shadow._MAX_WAITING
    monkeypatch.setattr(shadow, "_MAX_WAITING_BYTES", 100)
    small = made(100.0)
    for seq in range(5):
        small.offer(recorded(seq))
    assert (len(small._waiting["master"]), small.counts["dropped"]) == (2, 3)
    long = made(100.0)
    long.offer(recorded(0, said_by_master=answer("x" * 100)))
    assert (len(long._waiting["master"]), long.counts["dropped"]) == (0, 1)


def test_apprentice_is_asked_what_the_master_was_asked_without_what_no_server_here_takes() -> None:
    body = {**CHAT, "n": 2, "stream": True, "stream_options": {"include_usage": True}, "store": True, "unknown": 1}
    call = recorded(0, msgspec.json.encode(body)).call
    asked = msgspec.json.decode(msgspec.json.encode(apprentice_call(call, "a", Permitted()).fields))
    kept = ("temperature", "reasoning_effort", "messages", "tools")
    assert asked == {"model": "a", **{name: CHAT[name] for name in kept}}
    call.fields["max_tokens"], call.fields["seed"] = Raw(b"3"), Raw(b"true")
    with pytest.raises(ApiError):
        apprentice_call(call, "a", Permitted())


NAMES = st.text(st.characters(categories=("L", "N", "P", "S"), codec="utf-8"), min_size=1, max_size=12).filter(is_name)
ABOUT_TRAINING = ("trainer", "judge", "journeywork", "store/datasets")


@given(project=NAMES, trajectory=NAMES, call=st.integers(0, 2**31))
def test_a_shadow_is_on_no_subject_that_teaches(project: str, trajectory: str, call: int) -> None:
    """What training learns from is read by subject: of all that judges and trainers consume or read, a shadow call and
    its comparison are only what the judge compares."""
    names: Any = {"project": project, "trajectory": trajectory, "call": call, "model": trajectory, "outside": project}
    answered = ShadowAnswered(
        **names, policy_version="m@1", step=1, response=b"{}", sampled_ids=b"", logprobs=b"", same=False
    )
    compared = AnswersCompared(**names, outside_score=1.0, apprentice_score=0.0)
    readers = {spec.name for spec in CONSUMERS if spec.name.startswith(("judge", "trainer"))} - {"judge-shadows"}
    filters = [subject for spec in CONSUMERS if spec.name in readers for subject in spec.subjects]
    filters += [subject_filter(kind) for kind in EVENTS if kind not in (ShadowAnswered, AnswersCompared)]
    for event in (answered, compared):
        assert not any(takes(each, event.subject()) for each in filters)


def takes(each: str, subject: str) -> bool:
    """Whether a subject filter of NATS takes a subject."""
    wanted, tokens = each.split("."), subject.split(".")
    head = wanted.index(">") if ">" in wanted else len(wanted)
    fits = all(w in ("*", t) for w, t in zip(wanted[:head], tokens, strict=False))
    return fits and (len(tokens) > head if ">" in wanted else len(tokens) == head)


def test_only_the_judge_of_answers_reads_shadow_calls() -> None:
    root = Path(__file__).parents[3]
    files = [file for folder in ABOUT_TRAINING for file in (root / folder).rglob("*.py")]
    readers = [file.name for file in files if re.search("ShadowAnswered|AnswersCompared", file.read_text("utf-8"))]
    assert sorted(readers) == ["comparing.py", "healing.py"]


def answer(content: Any, *calls: tuple[str, str]) -> Answer:
    message = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": name, "function": {"name": name, "arguments": arguments}} for name, arguments in calls],
    }
    return Answer({}, b"", [SampledChoice(0, fields={"message": Raw(msgspec.json.encode(message))})])


MALFORMED = (b"[]", b'{"tool_calls": [null]}', b'{"tool_calls": 5}', b'{"tool_calls": [{"function": "x"}]}')


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (answer("yes"), answer(" yes\n"), True),
        (answer("yes"), answer("no"), False),
        (answer('{"a": 1, "b": [2]}'), answer('{"b":[2],"a":1.0}'), True),
        (answer('{"a": 1}'), answer('{"a": 2}'), False),
        (answer(None, ("look", '{"at": "a1"}')), answer("", ("look", '{ "at":"a1" }')), True),
        (answer(None, ("look", '{"at": "a1"}')), answer(None, ("look", '{"at": "b1"}')), False),
        (answer(None, ("look", "{}")), answer(None, ("see", "{}")), False),
        (answer("x", ("look", "{}")), answer("x"), False),
        (answer("x"), Answer({}, b"", []), False),
    ],
)
def test_answers_that_say_the_same(one: Answer, other: Answer, same: bool) -> None:
    assert (comparable_answer(one) == comparable_answer(other)) is same


@pytest.mark.parametrize("message", MALFORMED)
def test_an_answer_that_is_no_chat_completion_says_nothing_to_compare(message: bytes) -> None:
    with pytest.raises(UNREADABLE):
        comparable_answer(Answer({}, b"", [SampledChoice(0, fields={"message": Raw(message)})]))


@pytest.mark.parametrize(
    ("wrong", "error"),
    [({"apprentice": "other"}, "none of `models`"), ({"shadow_percent": 5.0}, "name the apprentice")],
)
def test_settings_that_cannot_be_meant(wrong: dict[str, Any], error: str) -> None:
    outside = OutsideConfig(name="m", url="http://h/v1", **wrong)
    with pytest.raises(ConfigError, match=error):
        check(Config(models=(ModelConfig(name="a"),), outside=(outside,)))
