"""Detected runs belong to the key whose calls began them, and go on at any gateway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import httpx
import msgspec
import pytest

from pipeline.config import DetectionConfig, GatewayConfig, NatsConfig, ReplicasConfig
from pipeline.events import ExchangeRecorded
from pipeline.log.broker import Broker
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.conversations import CallMessages, quotes
from rollout_gateway.capture.detection import TrajectoryDetector
from rollout_gateway.capture.registry import Registry
from rollout_gateway.capture.trajectory import Trajectory
from rollout_gateway.dialects.calls import Answer, SampledChoice
from rollout_gateway.dialects.endpoints import read_chat
from tests.kits.events import exchange
from tests.kits.waiting import until
from tests.rollout_gateway.conftest import StartGateway


async def test_a_run_goes_on_with_calls_of_its_own_key_only(broker: Broker) -> None:
    gateway = Gateway(broker, idle_s=600)
    gateway.detector._ready.set()
    runs, history = {}, []
    for owner in ("alice", "bob"):
        runs[owner], history = await gateway.ask([user("hello")], "hi", owner)
    assert [run.opened.owner for run in runs.values()] == ["alice", "bob"]
    assert runs["alice"].id != runs["bob"].id
    more = _call([*history, user("more")])
    for owner in ("bob", "alice"):
        assert (await gateway.detector.find(more, "m", owner)) is runs[owner]
    assert (await gateway.detector.find(more, "m", "carol")).id not in {r.id for r in runs.values()}


@pytest.mark.parametrize("kept", [True, False], ids=["sends the empty message back", "leaves it out"])
async def test_a_run_goes_on_after_an_empty_answer(broker: Broker, kept: bool) -> None:
    """The AI SDK leaves an empty message of the assistant out of the history, other clients send it back."""
    gateway = Gateway(broker, idle_s=600)
    gateway.detector._ready.set()
    run, history = await gateway.ask([user("hello")], "")
    more = _call([*(history if kept else history[:1]), user("more")])
    assert (await gateway.detector.find(more, "m", "alice")) is run


# -- several gateways on one log ---------------------------------------------------------------------------------------


class Gateway:
    """A gateway's detection, with a connection of its own."""

    def __init__(self, broker: Broker, idle_s: float) -> None:
        self.registry = Registry(broker, "test", TrajectoryTokens(b"0" * 32, "test"))
        config = GatewayConfig(
            detection=DetectionConfig(enabled=True, idle_s=idle_s), replicas=ReplicasConfig(timeout_s=1)
        )
        self.detector = TrajectoryDetector("test", self.registry, config)

    async def ask(
        self, messages: list[dict[str, Any]], said: str, owner: str = "alice"
    ) -> tuple[Trajectory, list[dict[str, Any]]]:
        """Make a call that is answered with `said`. Returns its run, and the messages up to the answer."""
        call = _call(messages)
        run = await self.detector.find(call, "m", owner)
        run.begin()
        await self.record(run, messages, said)
        answer = {"role": "assistant", "content": said}
        sampled = SampledChoice(0)
        sampled.fields["message"] = msgspec.Raw(msgspec.json.encode(answer))
        await self.detector.note_answer(run, call, Answer({}, b"", [sampled]))
        run.end()
        return run, [*messages, answer]

    async def record(self, run: Trajectory, messages: list[dict[str, Any]], said: str) -> None:
        number = run.recorded.next_seq
        response = {"id": f"r{number}", "choices": [{"message": {"role": "assistant", "content": said}}]}
        bodies = {"request": {"model": "m", "messages": messages}, "response": response}
        call: dict[str, Any] = {name: msgspec.json.encode(body) for name, body in bodies.items()}
        call |= {"project": "test", "group": run.opened.group, "request_hash": str(number)}
        await run.record([exchange(run.id, **call)])


def _call(messages: list[dict[str, Any]]) -> Any:
    return read_chat(msgspec.json.encode({"model": "m", "messages": messages}))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@asynccontextmanager
async def gateways(nats: NatsConfig, count: int, *, idle_s: float = 600) -> AsyncIterator[list[Gateway]]:
    async with AsyncExitStack() as stack:
        brokers = [await stack.enter_async_context(Broker.connect(nats)) for _ in range(count)]
        found = [Gateway(broker, idle_s) for broker in brokers]
        tg = await stack.enter_async_context(anyio.create_task_group())
        for gateway in found:
            tg.start_soon(gateway.detector.run)
            tg.start_soon(gateway.registry.follow_completions)
        yield found
        tg.cancel_scope.cancel()


async def exchanges(gateway: Gateway, run: str) -> int:
    return await gateway.registry.log.broker.count(ExchangeRecorded, project="test", trajectory=run)


async def test_calls_that_say_the_same_at_once_on_two_gateways_continue_different_runs(nats_config: NatsConfig) -> None:
    """Eight agents got the same first answer. Their second calls come at once, to any gateway."""
    async with gateways(nats_config, 2) as both:
        begun = [await both[n % 2].ask([user("task")], "same") for n in range(8)]
        history = begun[0][1]
        second = await asyncio.gather(*(both[n // 4].ask([*history, user("more")], "end") for n in range(8)))
        runs = {run.id for run, _ in begun}
        assert len(runs) == 8
        assert {run.id for run, _ in second} == runs
        for run in runs:
            assert await exchanges(both[0], run) == 2


async def test_a_call_that_fails_leaves_its_run_to_the_repeated_call(nats_config: NatsConfig) -> None:
    async with gateways(nats_config, 2) as (a, b):
        run, history = await a.ask([user("task")], "one")
        more = _call([*history, user("more")])
        assert (await a.detector.find(more, "m", "alice")).id == run.id  # and is not answered
        await until(lambda: b.detector._waiting.oldest_after(0))
        assert (await b.detector.find(more, "m", "alice")).id == run.id


async def test_a_silent_run_is_completed_once_and_not_while_it_goes_on_elsewhere(nats_config: NatsConfig) -> None:
    async with gateways(nats_config, 2) as (a, b):
        silent, _ = await a.ask([user("silent")], "one")
        run, history = await a.ask([user("task")], "one")
        taken = await b.detector.find(_call([*history, user("more")]), "m", "alice")
        taken.begin()  # a call that takes longer than the time of silence
        a.detector._idle_s = b.detector._idle_s = 0.0  # which is over now
        with anyio.fail_after(60):
            while await a.registry.log.completion(silent.opened) is None:
                for gateway in (a, b):
                    await gateway.detector._complete_idle()
                await asyncio.sleep(0.05)
        assert taken.id == run.id
        assert await a.registry.log.completion(run.opened) is None
        await b.record(taken, [*history, user("more")], "two")
        assert await exchanges(a, run.id) == 2


async def test_the_time_without_any_gateway_is_no_silence(nats_config: NatsConfig) -> None:
    async with gateways(nats_config, 1) as (before,):
        run, history = await before.ask([user("task")], "one")
    async with gateways(nats_config, 1, idle_s=600) as (after,):
        await asyncio.wait_for(after.detector._ready.wait(), 60)
        after.detector._serving_since -= 599  # it has been there for nearly as long
        await after.detector._complete_idle()
        assert await after.registry.log.completion(run.opened) is None
        after.detector._serving_since -= 3600
        await after.detector._complete_idle()
        assert await after.registry.log.completion(run.opened) is None  # and the run has been silent for less
        assert (await after.ask([*history, user("more")], "two"))[0].id == run.id


async def test_a_gateway_that_starts_restores_runs_whose_process_died_in_a_call(nats_config: NatsConfig) -> None:
    async with gateways(nats_config, 1) as (before,):
        run, history = await before.ask([user("task")], "one")
        await before.detector.find(_call([*history, user("more")]), "m", "alice")
    async with gateways(nats_config, 1) as (after,):
        again, _ = await after.ask([*history, user("more")], "two")
        assert again.id == run.id


async def test_a_restored_run_that_went_on_elsewhere_is_not_continued_from_its_old_end(nats_config: NatsConfig) -> None:
    async with gateways(nats_config, 1) as (a,):
        run, history = await a.ask([user("task")], "one")
        taken = await a.detector.find(_call([*history, user("more")]), "m", "alice")
        async with gateways(nats_config, 1) as (b,):  # it can't know that the call is in flight
            await asyncio.wait_for(b.detector._ready.wait(), 60)
            await a.record(taken, [*history, user("more")], "two")
            twin, _ = await b.ask([*history, user("more")], "two")
            assert twin.id != run.id


@pytest.mark.timeout(20)
@pytest.mark.parametrize("tag", ["system-reminder", "analysis"])
def test_a_tag_that_is_never_closed_takes_linear_time(tag: str) -> None:
    text = f"<{tag}>" * 100_000
    told = [user(text), {"role": "assistant", "content": text}]
    conversation = CallMessages.read("alice", "m", told, [])
    assert conversation.user_texts == {text}
    assert quotes(conversation, [])


def test_a_call_of_thousands_of_answers_asks_the_log_about_few_histories() -> None:
    """The fault that was: a body of 16,000 answers was 16,000 requests to the log."""
    said = [{"role": "assistant", "content": str(n)} for n in range(1000)]
    messages = CallMessages.read("", "m", [*said, {"role": "user", "content": "go on"}], [])
    assert messages.possible_histories() == messages.histories[-2:-66:-1]


def test_no_client_opens_a_run_that_looks_detected(start_front: StartGateway) -> None:
    """The fault that was: a gateway that started read them all as its own before it answered a detected run."""
    gateway = start_front()
    refused = httpx.post(f"{gateway.url}/v1/trajectories", json={"model": "tictactoe", "id": "i-20261130-x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_name")


def test_what_a_client_adds_to_a_text_is_left_out() -> None:
    reminders = "<system-reminder>x <system-reminder> y</system-reminder>b<system-reminder>\nz</system-reminder>"
    text = f"a {reminders} c <system-reminder>"
    assert CallMessages.read("alice", "m", [user(text)], []).user_texts == {"a b c <system-reminder>"}
