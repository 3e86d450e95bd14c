"""Trajectories that are made of calls which were recorded in another one."""

from typing import Any

import httpx
import msgspec
import pytest

from pipeline.events import (
    ExchangeRecorded,
    GroupDiscarded,
    GroupScored,
    TrainingBatch,
    TrajectoryCompleted,
    TrajectoryOpened,
    encode,
)
from pipeline.log.broker import Broker
from rollout_gateway.capture import copies
from rollout_gateway.capture.registry import Completion
from rollout_gateway.http.errors import ApiError
from tests.kits.events import exchange, letter, opened
from tests.kits.waiting import until_true
from tests.rollout_gateway.access.test_access import Caller
from tests.rollout_gateway.conftest import PROJECT, GatewayProcess, StartGateway, publish_adapter
from tests.rollout_gateway.kit import ASK, error, exchanges, key_config, registry_of, serves

pytestmark = pytest.mark.inference

BATCH = {"id": "b1", "groups": ["g1", "g2"], "settings": {"optimizer.learning_rate": 0.5}}


def reference(choice: Any) -> dict[str, Any]:
    """What a completion names a choice of an answer by."""
    return {**choice.journeywork, "choice": choice.index}


def complete_group(gateway: GatewayProcess, group: str, *members: dict[str, Any], **body: Any) -> httpx.Response:
    url = f"{gateway.url}/v1/groups/{group}/complete"
    return httpx.post(url, json={"model": "tictactoe", "trajectories": members, **body}, timeout=60)


def without_place(event: ExchangeRecorded) -> ExchangeRecorded:
    return msgspec.structs.replace(event, trajectory="", group="", seq=0, copied_from="")


async def test_calls_of_one_trajectory_become_the_members_of_a_group(gateway: GatewayProcess, broker: Broker) -> None:
    agent = gateway.agent(gateway.open(id="calls", split="val", references=True))
    first = agent.chat.completions.create(**{**ASK, "n": 2}).choices
    second = agent.chat.completions.create(**ASK).choices[0]
    finish = [c for c in agent.chat.completions.create(**ASK, stream=True) if c.choices[0].finish_reason]
    streamed = finish[-1].choices[0]
    text = agent.completions.create(model="tictactoe", prompt="a1=x", max_tokens=3).choices[0]
    members = (
        {"id": "m1", "exchanges": [reference(first[0]), reference(second)], "reward": 1.0, "batch": BATCH},
        {"id": "m2", "exchanges": [reference(first[1]), reference(streamed)], "reward": 0.0, "batch": BATCH},
        {"id": "m3", "exchanges": [reference(text)], "reward": 0.5, "batch": BATCH},
    )
    done = complete_group(gateway, "g1", *members, task="play")
    assert done.status_code == 200, done.text
    assert [(t["id"], t["exchanges"]) for t in done.json()["data"]] == [("m1", 2), ("m2", 2), ("m3", 1)]
    assert complete_group(gateway, "g1", *members, task="play").json() == done.json()
    made = await exchanges(broker, "calls")
    assert [(e.seq, e.choice) for e in made] == [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0)]
    for member, originals in {"m1": (0, 2), "m2": (1, 3), "m3": (4,)}.items():
        copies = await exchanges(broker, member)
        assert [without_place(e) for e in copies] == [without_place(made[n]) for n in originals]
        assert [e.copied_from for e in copies] == [f"calls/{made[n].seq}" for n in originals]
        assert [e.seq for e in copies] == list(range(len(originals)))
        assert {e.group for e in copies} == {"g1"}
    ended = [r.event for r in await broker.read(TrajectoryCompleted, project=PROJECT)]
    assert {e.trajectory: (e.group_size, e.attempt, e.task, e.split) for e in ended} == {
        f"m{n}": (3, n, "play", "train") for n in (1, 2, 3)
    }
    settings = b'{"optimizer.learning_rate":0.5}'
    assert {e.batch for e in ended} == {TrainingBatch(id="b1", groups=("g1", "g2"), settings=settings)}


async def test_what_one_completion_copies_is_bounded(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of 100 bytes is named many times."""
    monkeypatch.setattr(copies, "_COPIED_BYTES", 1000)
    registry = registry_of(broker)
    calls = await registry.open(opened("calls", references=True), "")
    await calls.record([exchange("calls", request=b'"%b"' % (b"x" * 98), prompt=(), response=b'{"id": "r0"}')])
    named = copies.Reference(trajectory="calls", reply="r0")
    for name, count in (("m1", 10), ("m2", 11)):
        await registry.open(opened(name), "")
        completing = registry.complete(name, Completion(exchanges=(named,) * count))
        if count == 10:
            assert (await completing).exchanges == 10
        else:
            with pytest.raises(ApiError, match="more than 1,000 bytes") as refused:
                await completing
            assert (refused.value.status, refused.value.code) == (413, "body_too_large")


async def test_what_one_completion_repeats_is_bounded(start_front: StartGateway, broker: Broker) -> None:
    """A task of 1 MB is given to many members."""
    members = [{"id": f"t{n}", "reward": 0.0, "batch": {"id": "b", "groups": ["g"]}} for n in range(20)]
    refused = complete_group(start_front(), "g", *members, task="x" * 900_000)
    assert (refused.status_code, refused.json()["error"]["param"]) == (413, "task")
    assert await broker.read(TrajectoryOpened, project=PROJECT) == []


async def test_what_cannot_be_referenced_is_named(gateway: GatewayProcess) -> None:
    gateway.open(id="plain")
    for client in (gateway.client(), gateway.agent(gateway.open(id="own-calls"))):
        assert not hasattr(client.chat.completions.create(**ASK).choices[0], "journeywork")
    agent = gateway.agent(gateway.open(id="calls", references=True))
    good = reference(agent.chat.completions.create(**ASK).choices[0])

    def refused(member: dict[str, Any], **body: Any) -> tuple[int, str]:
        reply = complete_group(gateway, "g", {"id": "m", "reward": 1.0, **member}, **body)
        opened = httpx.get(f"{gateway.url}/v1/trajectories/{member.get('id', 'm')}")
        assert opened.status_code == (200 if member.get("id") == "own" else 404)  # nothing more is left open
        return error(reply)

    assert refused({"exchanges": [{**good, "choice": 1}]}) == (404, "exchange_not_found")
    assert refused({"exchanges": [{**good, "trajectory": "plain"}]}) == (400, "wrong_reference")
    assert refused({"exchanges": [{**good, "trajectory": "nobody"}]}) == (404, "trajectory_not_found")
    assert refused({"id": "new", "exchanges": [good]}, model="chess") == (404, "model_not_found")
    assert refused({"exchanges": [good], "batch": {"id": "b", "groups": []}}) == (400, "invalid_body")
    for name in ("", "x" * 600):  # the trainer reads the groups of a batch from the log by their names
        batch = {"id": "b", "groups": ["g", name]}
        assert refused({"exchanges": [good], "batch": batch}) == (400, "invalid_name")
    for name, value in (("optimizer.learning_rate", -1), ("loss.type", "nope"), ("lora.rank", 4), ("loss", 1)):
        batch = {**BATCH, "groups": ["g"], "settings": {name: value}}
        assert refused({"exchanges": [good], "batch": batch}) == (400, "invalid_settings")
    own = gateway.open(id="own", group="g", key_completes=True)
    gateway.agent(own).chat.completions.create(**ASK)
    assert refused({"id": "own", "exchanges": [good]}) == (409, "calls_of_its_own")
    assert error(complete_group(gateway, "another", {"id": "own", "reward": 1.0})) == (400, "wrong_group")
    completing = "POST", "/v1/trajectories/own/complete", {"reward": 1.0, "batch": BATCH}
    assert error(Caller(gateway, own["api_key"]).ask(*completing)) == (403, "wrong_role")


async def test_a_copy_that_broke_off_is_continued_by_another_replica(
    start_gateway: StartGateway, broker: Broker
) -> None:
    gateway = start_gateway()
    agent = gateway.agent(gateway.open(id="calls", references=True))
    calls = [reference(agent.chat.completions.create(**ASK).choices[0]) for _ in range(3)]
    gateway.restart(crash_at="broker.before_publish:5")  # the group, the run and two copies are on the log
    with pytest.raises(httpx.TransportError):
        complete_group(gateway, "g", {"id": "m", "exchanges": calls, "reward": 1.0})
    assert len(await exchanges(broker, "m")) == 2
    other = start_gateway(folder="other")
    done = complete_group(other, "g", {"id": "m", "exchanges": calls, "reward": 1.0})
    assert done.status_code == 200, done.text
    copies = await exchanges(broker, "m")
    assert [e.copied_from for e in copies] == ["calls/0", "calls/1", "calls/2"]


async def test_what_became_of_a_group(gateway: GatewayProcess, broker: Broker) -> None:
    def state(group: str) -> tuple[str, ...]:
        said = httpx.get(f"{gateway.url}/v1/groups/{group}").json()
        return said["status"], said["version"], said["reason"], said["detail"]

    waiting = ("waiting", "", "", "")
    assert state("g1") == waiting
    await publish_adapter(broker, 1, groups=("g0", "g1"))
    await serves(gateway, "tictactoe@1")
    about: Any = {"project": PROJECT, "model": "tictactoe"}
    for name, reason in (("g2", "late"), ("g3", "no_variance")):
        discard = GroupDiscarded(group=name, trajectories=("t",), reason=reason, by="judge", detail="why", **about)
        await broker.publish(discard)
    scored = GroupScored(group="g4", judge="j", members=(), **about)
    elsewhere = msgspec.structs.replace(scored, project="another", group="g2")
    dead: Any = {"stream": "GROUPS", "consumer": "trainer", "reason": "sampler_mismatch", "detail": "too far"}
    for seq, payload in ((7, b"\xff no event"), (8, encode(elsewhere)), (9, encode(scored))):
        await broker.publish(letter(seq, payload=payload, **dead))
    assert state("g1") == ("trained", "tictactoe@1", "", "")
    assert state("g2") == waiting
    assert state("g3") == ("discarded", "", "no_variance", "why")
    assert state("g4") == ("dead", "", "sampler_mismatch", "too far")
    completed = TrajectoryCompleted(trajectory="t", group="g5", **about)
    of_judge: Any = {"stream": "ROLLOUTS", "consumer": "judge", "reason": "ended_service"}
    await broker.publish(letter(10, payload=encode(completed), **of_judge))
    assert state("g5")[0] == "dead"
    await broker.publish(msgspec.structs.replace(scored, group="g5"))  # it was retried
    assert state("g5") == waiting
    assert error(httpx.get(f"{gateway.url}/v1/groups/g1", params={"model": "nope"})) == (404, "model_not_found")


async def test_a_step_tells_an_agents_key_no_metrics_of_other_agents(start_front: StartGateway, broker: Broker) -> None:
    """The fault that was: it told the means of all keys' metrics, and one named `reward` in place of the reward."""
    gateway = start_front(keys=(key_config("agent"), key_config("boss", role="operator")))
    agent, boss = Caller(gateway, "agent"), Caller(gateway, "boss")
    agent.open(group="g")
    metrics = {"reward_mean_all": 0.5, "run/price": 41.0, "run/reward": 1e15}
    await publish_adapter(broker, 1, groups=("g",), metrics=metrics)
    await until_true(lambda: boss.ask("GET", "/v1/groups/g?model=tictactoe").json()["status"] == "trained")
    own = {"trainer/reward_mean_all": 0.5, "train/reward": 0.5}
    of_runs = {"trainer/run/price": 41.0, "train/price": 41.0, "trainer/run/reward": 1e15}
    assert boss.ask("GET", "/v1/groups/g?model=tictactoe").json()["metrics"] == own | of_runs
    assert agent.ask("GET", "/v1/groups/g?model=tictactoe").json()["metrics"] == own


async def test_settings_of_a_batch_need_an_operator(start_front: StartGateway) -> None:
    gateway = start_front(keys=(key_config("agent"), key_config("boss", role="operator")))

    def answered(key: str, run: str, batch: dict[str, Any]) -> int:
        body = {"model": "tictactoe", "trajectories": [{"id": run, "reward": 1.0, "batch": batch}]}
        return Caller(gateway, key).status("POST", f"/v1/groups/g-{run}/complete", body)

    assert answered("agent", "m", BATCH | {"groups": ["g-m"]}) == 403
    # A member of a batch without calls counts in the baseline: whoever may open a run may send it.
    assert answered("agent", "n", {"id": "b1", "groups": ["g-n"]}) == 200
    assert answered("boss", "o", BATCH | {"groups": ["g-o"]}) == 200
