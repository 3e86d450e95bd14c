"""How much feedback a key may give, and what a repetition under the same key is."""

from concurrent.futures import ThreadPoolExecutor

import anyio.to_thread
import msgspec

from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from rollout_gateway.capture.answer_ids import new_answer_id
from tests.kits.events import exchange
from tests.rollout_gateway.access.test_access import Caller
from tests.rollout_gateway.api.test_feedback import signals
from tests.rollout_gateway.conftest import PROJECT, StartGateway
from tests.rollout_gateway.fake_vllm import FakeVllm
from tests.rollout_gateway.kit import error, key_config

KEYS = (key_config("alice"), key_config("bob"), key_config("boss", role="operator"), key_config("fan", role="feedback"))


async def test_the_text_that_a_request_or_a_run_records_is_bounded(
    start_front: StartGateway, broker: Broker, nats_config: NatsConfig
) -> None:
    gateway = start_front(keys=KEYS)
    alice, boss = Caller(gateway, "alice"), Caller(gateway, "boss")
    names = [f"r{number}" for number in range(5)]
    for name in names:
        alice.open(id=name)
    longest = "é" * 65536
    assert error(alice.ask("POST", "/v1/feedback", {"ranking": names * 2, "text": longest})) == (413, "body_too_large")
    assert not await signals(nats_config)
    assert alice.status("POST", "/v1/feedback", {"ranking": names, "text": longest, "key": "k"}) == 201
    path = "/v1/trajectories/r0/feedback"
    (given,) = [signal for signal in await signals(nats_config) if signal.trajectory == "r0"]
    for number in range(60):
        await broker.publish(msgspec.structs.replace(given, signal=f"alice:k{number}", value=None, kind="text"))
    told = [alice.status("POST", path, {"text": longest, "key": f"k{number}"}) for number in range(60, 64)]
    assert told == [201, 201, 201, 409]
    # A retry, a short text and another key's text are taken.
    assert alice.status("POST", path, {"text": longest, "key": "k7"}) == 201
    assert alice.status("POST", path, {"text": "short"}) == 201
    assert boss.status("POST", path, {"text": longest}) == 201


async def test_a_key_gives_so_many_signals_on_a_run_and_takes_no_others_place(
    start_front: StartGateway, nats_config: NatsConfig
) -> None:
    gateway = start_front(keys=KEYS, max_signals=2)
    alice, fan = Caller(gateway, "alice"), Caller(gateway, "fan")
    for name in ("r", "s"):
        alice.open(id=name)
    path = "/v1/trajectories/r/feedback"
    for key in ("1", "2"):
        assert fan.ask("POST", path, {"thumb": "up", "key": key}).status_code == 201
    assert error(fan.ask("POST", path, {"text": "more"})) == (409, "too_many_signals")
    assert fan.ask("POST", path, {"thumb": "up", "key": "2"}).json()["signals"][0]["repeated"]
    ranking = {"ranking": ["s", "r"]}
    assert error(fan.ask("POST", "/v1/feedback", ranking)) == (409, "too_many_signals")
    # Another signal under its key is told of first.
    assert error(fan.ask("POST", "/v1/feedback", {**ranking, "key": "2"})) == (409, "request_exists")
    assert fan.ask("POST", "/v1/trajectories/s/feedback", {"thumb": "up"}).status_code == 201
    assert alice.ask("POST", path, {"thumb": "down"}).status_code == 201
    assert len(await signals(nats_config)) == 4


async def test_a_key_is_one_signal(start_front: StartGateway, nats_config: NatsConfig) -> None:
    gateway = start_front(keys=KEYS)
    alice, boss = Caller(gateway, "alice"), Caller(gateway, "boss")
    for name in ("r", "s", "t"):
        alice.open(id=name)
    path = "/v1/trajectories/r/feedback"
    for repeated in (False, True):
        (told,) = alice.ask("POST", path, {"thumb": "up", "key": "k"}).json()["signals"]
        assert told["repeated"] is repeated
    assert error(alice.ask("POST", path, {"thumb": "down", "key": "k"})) == (409, "request_exists")
    # A ranking of which one member is refused changes nothing.
    assert error(alice.ask("POST", "/v1/feedback", {"ranking": ["s", "r"], "key": "k"})) == (409, "request_exists")
    # Contradictory feedback is two signals, and so is that of another key under the same id.
    assert alice.status("POST", path, {"thumb": "down", "key": "l"}) == 201
    assert boss.status("POST", path, {"thumb": "down", "key": "k"}) == 201
    given = await signals(nats_config)
    assert [(s.signal, s.value, s.by) for s in given] == [
        ("alice:k", 1.0, "alice"),
        ("alice:l", -1.0, "alice"),
        ("boss:k", -1.0, "boss"),
    ]
    # A ranking of other runs under the same key adds theirs.
    for runs, told_before in ((["s", "t"], [False, False]), (["s", "r"], [True, False])):
        told = alice.ask("POST", "/v1/feedback", {"ranking": runs, "key": "m"}).json()["signals"]
        assert [line["repeated"] for line in told] == told_before
    again = alice.ask("POST", "/v1/feedback", {"ranking": ["t", "s"], "key": "m"})
    assert error(again) == (409, "request_exists")


async def test_feedback_costs_the_mebibytes_of_the_run_that_it_reads(start_front: StartGateway, broker: Broker) -> None:
    keys = (key_config("alice"), key_config("fan", role="feedback", calls_per_minute=6))
    gateway = start_front(keys=keys)
    Caller(gateway, "alice").open(id="r")
    ids = [new_answer_id("r") for _ in range(4)]
    for seq, name in enumerate(ids):
        response = msgspec.json.encode({"id": name, "text": str(seq) * (3 << 20)})
        await broker.publish(exchange("r", project=PROJECT, seq=seq, response=response))
    fan = Caller(gateway, "fan")

    def give(key: str) -> int:
        return fan.status("POST", "/v1/feedback", {"thumb": "up", "answer": ids[0], "key": key})

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(give, "abcd")) == [201, 429, 429, 429]


async def test_a_run_and_a_group_have_a_largest_size(start_gateway_alone: StartGateway, fake_vllm: FakeVllm) -> None:
    urls = (fake_vllm.url,)
    gateway = await anyio.to_thread.run_sync(
        lambda: start_gateway_alone(urls=urls, max_run_bytes=3000, max_group_size=2)
    )

    def ask() -> None:
        caller = Caller(gateway, "")
        run = Caller(gateway, caller.open(id="r")["api_key"])
        body = {"model": "tictactoe", "messages": [{"role": "user", "content": "x" * 1000}]}
        replies = [run.ask("POST", "/v1/chat/completions", body) for _ in range(4)]
        assert [reply.status_code for reply in replies] == [200, 200, 200, 413]
        assert "gateway.max_run_bytes is 3,000). Complete it" in replies[-1].json()["error"]["message"]
        assert caller.status("POST", "/v1/trajectories/r/complete", {"reward": 1}) == 200
        groups = [
            caller.ask("POST", "/v1/trajectories", {"model": "tictactoe", "group": "g", "group_size": 3}),
            caller.ask("POST", "/v1/groups/g/complete", {"trajectories": [{"id": f"m{n}"} for n in range(3)]}),
        ]
        assert [error(reply) for reply in groups] == [(413, "group_too_large")] * 2

    await anyio.to_thread.run_sync(ask)
