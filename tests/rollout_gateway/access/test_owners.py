"""Groups, batches and evaluations belong to the key that opened them, as runs do."""

from itertools import product
from typing import Any

import anyio.to_thread
import httpx
import pytest

from pipeline.events import GroupDiscarded, GroupOpened, GroupScored, TrajectoryCompleted, TrajectoryOpened
from pipeline.log.broker import Broker
from pipeline.names import new_dated_id
from rollout_gateway.capture.conversations import CallMessages
from tests.rollout_gateway.access.test_access import KEYS, LET_IN, Caller
from tests.rollout_gateway.conftest import PROJECT, StartGateway
from tests.rollout_gateway.kit import error, key_config
from tests.store.kit import exchange


def opening(**fields: Any) -> dict[str, Any]:
    return {"model": "tictactoe", **fields}


@pytest.mark.slow
async def test_a_group_belongs_to_the_key_that_opened_it_first(start_front: StartGateway, broker: Broker) -> None:
    gateway = start_front(keys=KEYS)
    alice, boss = (Caller(gateway, name) for name in ("alice", "boss"))
    alice.open(id="a1", group="g", group_size=2)
    own = alice.open()["id"]
    dated = alice.open(group=new_dated_id("g"))["group"]  # a run of this name would open the group of its name

    def refused(key: str) -> None:
        caller = Caller(gateway, key)
        for group, split in product(("g", own), ("train", "val")):
            joined = caller.ask("POST", "/v1/trajectories", opening(id="b1", group=group, group_size=1, split=split))
            assert error(joined) == (409, "group_exists")
        assert caller.call(**{"x-journeywork-trajectory": "b2", "x-journeywork-group": "g"}) == 409
        assert error(caller.ask("POST", "/v1/trajectories", opening(id=dated))) == (409, "group_exists")

    refused("bob")
    gateway.restart()
    refused("bob")
    boss.open(id="c1", group="g")
    # The first opening fixes the size.
    assert error(alice.ask("POST", "/v1/trajectories", opening(id="a2", group="g", group_size=1)))[0] == 409
    alice.open(id="a2", group="g")
    assert alice.open(id="a4", group="g", split="val")["group"] == "g"
    assert alice.call(**{"x-journeywork-trajectory": "a3", "x-journeywork-group": "g"}) == LET_IN
    for name in ("a2", "a3"):
        assert alice.ask("GET", f"/v1/trajectories/{name}").json()["group_size"] == 2
    openings = [r.event for r in await broker.read(GroupOpened, project=PROJECT, group="g", model="tictactoe")]
    assert [(e.owner, e.group_size) for e in openings] == [("alice", 2)]
    opened = [r.event for r in await broker.read(TrajectoryOpened, project=PROJECT)]
    assert {e.group_size for e in opened if (e.group, e.split) == ("g", "train")} == {2}


@pytest.mark.parametrize("said", [(), ("assistant", "user")])
def test_no_key_opens_another_keys_detected_groups_first(start_front: StartGateway, said: tuple[str, ...]) -> None:
    """Who knows the name of a key, and what its agents say first, still can't tell how their group will be named."""
    gateway = start_front(keys=KEYS, **{"detection.enabled": True})
    messages = [{"role": role, "content": "play"} for role in ("user", *said)]
    group = CallMessages.read("alice", "tictactoe", messages, None).group
    for name in (f"i-{group}", f"i-part-{group}"):
        Caller(gateway, "bob").open(group=name)
    body = {"model": "tictactoe", "messages": messages}
    alice = Caller(gateway, "alice")
    assert alice.status("POST", "/v1/chat/completions", body) == LET_IN


def test_a_key_that_fills_the_limit_of_groups_holds_up_no_other_key(start_front: StartGateway) -> None:
    gateway = start_front(keys=KEYS, max_groups_ahead=4)
    alice, bob, boss = (Caller(gateway, name) for name in ("alice", "bob", "boss"))

    def opened(caller: Caller, group: str) -> tuple[int, str]:
        return error(caller.ask("POST", "/v1/trajectories", opening(group=group)))

    assert [opened(alice, f"a{n}")[0] for n in range(5)] == [201] * 4 + [429]
    # Each of two keys may have two, each of three one.
    assert [opened(bob, f"b{n}")[0] for n in range(3)] == [201, 201, 429]
    assert [opened(boss, f"c{n}")[0] for n in range(2)] == [201, 429]
    assert opened(alice, "a5") == (429, "groups_ahead")
    assert opened(alice, "a1") == (201, "")


async def test_every_way_to_open_a_group_takes_room_within_the_limit(start_front: StartGateway, broker: Broker) -> None:
    """By the control API, by the headers and the metadata of a call, by completing a group of recorded calls."""
    gateway = start_front(keys=KEYS, max_groups_ahead=2)
    alice = Caller(gateway, "alice")
    for name in ("a0", "a1"):
        alice.open(group=name, references=True)

    def by_headers(name: str) -> int:
        return alice.call(**{"x-journeywork-trajectory": f"t-{name}", "x-journeywork-group": name})

    def by_metadata(name: str) -> tuple[int, str]:
        metadata = {"journeywork_trajectory": f"m-{name}", "journeywork_group": name}
        body = {"model": "tictactoe", "messages": [{"role": "user", "content": "x"}], "metadata": metadata}
        return error(alice.ask("POST", "/v1/chat/completions", body))

    assert [by_headers("b"), by_headers("a0")] == [429, LET_IN]
    assert by_metadata("b") == (429, "groups_ahead")
    source = alice.open(group="a0", references=True)["id"]
    call = exchange(source, project=PROJECT, model="tictactoe", response=b'{"id": "r", "choices": []}')
    await broker.publish(call)
    member: dict[str, Any] = {"id": "c1", "exchanges": [{"trajectory": source, "reply": "r"}], "reward": 1.0}

    def by_completion(group: str, **more: Any) -> tuple[int, str]:
        body = {"model": "tictactoe", "trajectories": [member | more]}
        return error(alice.ask("POST", f"/v1/groups/{group}/complete", body))

    assert by_completion("b") == (429, "groups_ahead")
    # A requested batch would wait for itself. The trainer bounds how many of its groups may wait.
    batch = {"id": "x", "groups": ["b"]}
    assert by_completion("b", batch=batch)[1] != "groups_ahead"


async def test_a_groups_state_is_for_its_key(start_front: StartGateway, broker: Broker) -> None:
    gateway = start_front(keys=KEYS)
    alice, bob, boss = (Caller(gateway, name) for name in ("alice", "bob", "boss"))
    alice.open(id="a1", group="g")
    own = alice.open()["id"]

    def states(group: str) -> list[int]:
        return [c.status("GET", f"/v1/groups/{group}?model=tictactoe") for c in (alice, bob, boss)]

    assert states("g") == states(own) == [200, 404, 200]
    assert states("unknown") == [404, 404, 200]
    told = bob.ask("GET", "/v1/groups/g?model=tictactoe").text
    assert told == bob.ask("GET", "/v1/groups/x?model=tictactoe").text.replace("'x'", "'g'")
    # The opening is gone with the log's first days, and the group is still known by what became of it.
    keys: Any = {"project": PROJECT, "model": "tictactoe", "owner": "bob"}
    await broker.publish(GroupScored(group="scored", judge="j", members=(), **keys))
    reason: Any = "too_small"
    await broker.publish(GroupDiscarded(group="gone", trajectories=("t",), reason=reason, by="judge", **keys))
    assert states("scored") == states("gone") == [404, 200, 200]
    for group in ("scored", "gone"):
        assert error(alice.ask("POST", "/v1/trajectories", opening(group=group))) == (409, "group_exists")
        assert bob.open(group=group)["group"] == group


async def test_a_batch_carries_its_owner_and_names_its_groups(start_front: StartGateway, broker: Broker) -> None:
    gateway = start_front(keys=KEYS)
    alice = Caller(gateway, "alice")
    alice.open(id="a1", group="g")
    path = "/v1/trajectories/a1/complete"
    batch: Any = {"id": "b", "groups": ["g", "h"]}
    assert error(alice.ask("POST", path, {"batch": {"id": "b", "groups": ["h"]}})) == (400, "wrong_group")
    assert error(alice.ask("POST", path, {"batch": {**batch, "owner": "bob"}})) == (400, "invalid_body")
    assert alice.status("POST", path, {"reward": 1, "batch": batch}) == 200
    assert alice.status("POST", path, {"reward": 1, "batch": batch}) == 200
    for other in ({}, {"batch": {**batch, "id": "c"}}, {"batch": {"id": "b", "groups": ["g"]}}):
        assert alice.status("POST", path, {"reward": 1, **other}) == 409
    (completed,) = [r.event for r in await broker.read(TrajectoryCompleted, project=PROJECT)]
    assert completed.batch is not None
    assert (completed.owner, completed.batch.owner, completed.batch.groups) == ("alice", "alice", ("g", "h"))


async def test_a_member_that_another_key_opens_meanwhile_is_not_completed(
    start_front: StartGateway, broker: Broker
) -> None:
    gateway = start_front(keys=KEYS)
    alice, bob = Caller(gateway, "alice"), Caller(gateway, "bob")
    batch = {"id": "b", "groups": ["ga"]}
    names = [*(f"m{number}" for number in range(150)), "ticket-17"]
    members = [{"id": name, "reward": -1.0, "batch": batch} for name in names]
    answered: list[httpx.Response] = []

    def complete() -> None:
        body = {"model": "tictactoe", "trajectories": members}
        answered.append(alice.ask("POST", "/v1/groups/ga/complete", body))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, complete)
        while not await broker.read(TrajectoryOpened, project=PROJECT, trajectory="m3"):
            await anyio.sleep(0.01)
        await anyio.to_thread.run_sync(lambda: bob.open(id="ticket-17", group="of-bob"))
    assert error(answered[0]) == (404, "trajectory_not_found")
    completed = [r.event.trajectory for r in await broker.read(TrajectoryCompleted, project=PROJECT)]
    assert "ticket-17" not in completed


def test_an_evaluation_belongs_to_the_key_that_recorded_it_first(start_front: StartGateway) -> None:
    gateway = start_front(keys=(*KEYS, key_config("chess", models=("chess",))))
    alice, bob, boss, chess = (Caller(gateway, name) for name in ("alice", "bob", "boss", "chess"))
    alice.open(id="a1")
    path = "/v1/evaluations"
    result = {"evaluation": "e", "entrant": "tictactoe@0", "model": "tictactoe", "version": "tictactoe@0", "runs": 1}
    other = {**result, "position": 1, "kind": "external", "model": "litellm:x", "version": ""}
    tasks = [{"task": "t", "reward": 0.5, "trajectories": ["a1"]}]
    assert error(bob.ask("POST", path, {**result, "tasks": tasks})) == (404, "trajectory_not_found")
    assert error(chess.ask("POST", path, result)) == (403, "model_not_allowed")
    assert error(chess.ask("POST", path, {**other, "model": "tictactoe"})) == (403, "model_not_allowed")
    assert error(chess.ask("POST", path, {**other, "version": "tictactoe@0"})) == (400, "invalid_name")
    assert alice.status("POST", path, {**result, "tasks": tasks}) == 201
    for body in (result, other, {**result, "tasks": tasks}):
        assert error(bob.ask("POST", path, body)) == (409, "evaluation_exists")
    assert alice.status("POST", path, other) == 201
    assert boss.status("POST", path, {**other, "position": 2}) == 201
