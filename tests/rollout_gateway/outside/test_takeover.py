"""Runs that name an outside model and are answered by its apprentice: who answers is fixed when a run opens, and the
record says who answered each call."""

import json
from typing import Any

import anyio
import httpx
import pytest

from pipeline.events import GroupDiscarded, PolicyPromoted, TrajectoryCompleted, TrajectoryOpened
from pipeline.names import split_point
from tests.kits.waiting import until
from tests.rollout_gateway.conftest import PROJECT, publish_adapter
from tests.rollout_gateway.kit import error, key_config
from tests.rollout_gateway.outside.conftest import APPRENTICE, CHAT, MASTER, OpenShop
from tests.rollout_gateway.outside.provider import MESSAGE, RESPONSE, chunks, completion, stream, whole

pytestmark = pytest.mark.timeout(120)


async def test_a_run_keeps_its_side_and_a_decision_moves_new_ones(open_shop: OpenShop) -> None:
    shop = await open_shop(promote=False)
    await shop.open("before")
    await shop.decide("split", version=APPRENTICE, other=MASTER, percent=40)
    names = [f"r{number}" for number in range(12)]
    for name in names:
        await shop.open(name)
    await shop.decide("promote", version=APPRENTICE)
    await shop.open("after")
    await shop.decide("rollback")
    for name in names:  # a client's retry of its opening, under another decision, is no other run
        await shop.open(name)
    await shop.decide("rollback")
    await shop.open("back")
    for name in ["before", *names, "after", "back"]:
        answer = await shop.call(name)
        assert answer.status_code == 200, answer.text
        own = name == "after" or (name in names and split_point(name) < 40)
        opened, (call,) = await shop.opened(name), await shop.calls(name)
        assert (opened.model, opened.pinned) == (("tictactoe", APPRENTICE) if own else ("master", ""))
        assert opened.asked == ("" if name == "before" else "master")
        assert (call.model, call.policy_version) == (opened.model, APPRENTICE if own else MASTER)
        assert bool(call.sampled_ids) == own == (answer.json()["model"] == APPRENTICE)
    assert {split_point(name) < 40 for name in names} == {True, False}
    assert len(shop.provider.got) == sum(split_point(name) >= 40 for name in names) + 2
    group = [(await shop.opened(name)).model for name in ("g1", "g2") if await shop.open(name, group="one")]
    assert len(set(group)) == 1
    events = [r.event for r in await shop.broker.read(PolicyPromoted)]
    assert events[-1].version == MASTER


async def test_a_call_of_a_run_that_was_taken_over_names_what_the_run_asked_for(open_shop: OpenShop) -> None:
    """Else an agent would get the answers of which the apprentice is unsure."""
    shop = await open_shop()
    await shop.open("r")
    for name in ("tictactoe", APPRENTICE):
        assert error(await shop.call("r", model=name)) == (400, "model_mismatch")
    assert (await shop.call("r")).status_code == 200


async def test_follow_routes_to_the_apprentices_name(open_shop: OpenShop) -> None:
    shop = await open_shop(promote=False)
    await shop.decide("follow")

    async def loaded() -> bool:  # the server loads the version that was published
        policies = (await shop.client.get("/v1/policies")).json()["data"]
        (policy,) = [policy for policy in policies if policy["model"] == "master"]
        return (policy["version"], policy["newest"]) == (APPRENTICE, APPRENTICE)

    await until(loaded)
    await shop.open("r")
    assert (await shop.call("r")).json()["model"] == APPRENTICE
    assert ((await shop.opened("r")).model, (await shop.opened("r")).pinned) == ("tictactoe", "")
    for wrong in ({"version": "tictactoe@7"}, {"version": "outside:other"}):
        await shop.decide("promote", 404, **wrong)
    about_itself = {"version": APPRENTICE, "min_logprob": -1.0}
    error = await shop.decide("promote", 400, model="tictactoe", **about_itself)
    assert error["error"]["param"] == "min_logprob"


async def test_a_decision_after_another_one_than_the_caller_knows_is_refused(open_shop: OpenShop) -> None:
    shop = await open_shop(promote=False)
    await shop.decide("split", version=APPRENTICE, other=MASTER, percent=5, request="begun")
    raised = {"version": APPRENTICE, "other": MASTER, "percent": 25, "request": "begun-25", "after": "begun"}
    await shop.decide("split", **raised)
    await shop.decide("split", **raised)  # repeated
    error = await shop.decide("promote", 409, version=APPRENTICE, request="late", after="begun")
    assert error["error"]["code"] == "decision_changed"
    assert [e.event.percent for e in await shop.broker.read(PolicyPromoted)] == [5, 25]


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
async def test_the_master_answers_where_the_apprentice_does_not(open_shop: OpenShop, path: str) -> None:
    said: dict[str, tuple[Any, Any, str]] = {
        "chat/completions": (completion(), {}, "chat"),
        "messages": (MESSAGE, {"max_tokens": 9}, "messages"),
        "responses": (RESPONSE, {"input": "a1=x"}, "responses"),
    }
    answer, body, dialect = said[path]
    shop = await open_shop(table_of={"dialect": dialect, "apprentice_wait_s": 4.0})
    shop.provider.says(whole(answer))
    body = {k: v for k, v in {**CHAT, **body}.items() if path != "responses" or k != "messages"}

    async def call(retry: bool = False) -> Any:
        headers = {"x-stainless-retry-count": str(int(retry))}
        return (await shop.client.post(f"/t/r/v1/{path}", json=body, headers=headers)).json()

    await shop.open("r")
    assert (await call())["model"] != answer["model"]
    shop.server.fail_with = 400
    assert await call() == answer
    shop.server.fail_with, shop.server.held = 0, anyio.Event()  # type: ignore[assignment]
    assert await call() == answer
    assert await call(retry=True) == answer
    assert len(shop.provider.got) == 2
    first, refused, slow, master = await shop.calls("r")
    assert (first.policy_version, first.status) == (APPRENTICE, "complete")
    assert refused.failed_providers == (f"{APPRENTICE}: the inference server answered 400",)
    assert (slow.policy_version, slow.status) == (APPRENTICE, "failed")
    assert master.policy_version == MASTER
    assert master.failed_providers == (
        f"{APPRENTICE}: The inference server did not answer within outside.apprentice_wait_s (4 s).",
    )
    assert {e.model for e in (first, refused, slow, master)} == {"tictactoe"}


async def test_no_provider_is_paid_for_a_run_that_was_completed_meanwhile(open_shop: OpenShop) -> None:
    """The master's answer could not be recorded either."""
    shop = await open_shop()
    await shop.open("r")
    shop.server.held = anyio.Event()  # type: ignore[assignment]
    answers: list[httpx.Response] = []

    async def call(**more: Any) -> None:
        answers.append(await shop.call("r", **more))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await shop.server.called(1)
        opened = await shop.opened("r")
        await shop.broker.publish(  # as another gateway does
            TrajectoryCompleted(
                project=PROJECT, trajectory="r", model=opened.model, group="", outcome="scored", exchanges=0
            )
        )

        async def refused() -> bool:
            return (await shop.call("r", temperature=0.5)).status_code == 409

        await until(refused)
        shop.server.held.set()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (409, "trajectory_completed")
    assert not shop.provider.got


async def test_a_runs_own_key_gives_feedback_whoever_answers_the_run(open_shop: OpenShop) -> None:
    shop = await open_shop()
    run = await shop.open("r", key_completes=True)
    await shop.call("r")
    await shop.post("/v1/trajectories/r/feedback", 201, key=run["api_key"], thumb="up")
    assert (await shop.opened("r")).model == "tictactoe"


async def test_without_the_setting_the_agent_gets_the_error(open_shop: OpenShop) -> None:
    shop = await open_shop(table_of={"apprentice_wait_s": 0.0})
    await shop.open("r")
    shop.server.fail_with = 500
    assert (await shop.call("r")).status_code >= 500
    assert not shop.provider.got


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
async def test_calls_of_which_the_apprentice_is_unsure_go_to_the_master(open_shop: OpenShop, streamed: bool) -> None:
    shop = await open_shop(promote=False)
    await shop.decide("promote", version=APPRENTICE, min_logprob=-1.0)
    await shop.open("r")
    shop.provider.says(stream(*chunks()) if streamed else whole(completion()))
    more = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    sure = await shop.call("r", **more)
    assert not shop.provider.got
    shop.server.logprob = -2.0
    unsure = await shop.call("r", **more)
    shown, hidden, master = await shop.calls("r")
    if streamed:
        assert sure.text.endswith("data: [DONE]\n\n")
        assert json.loads(sure.text.split("\n\n")[0].removeprefix("data: "))["model"] == APPRENTICE
        assert "big-2026" in unsure.text
    else:
        assert sure.json()["model"] == APPRENTICE
        assert unsure.json() == completion()
    assert (shown.status, hidden.status, master.status) == ("complete", "unsure", "complete")
    assert hidden.sampled_ids == shown.sampled_ids != b""
    assert master.policy_version == MASTER
    assert master.failed_providers == (f"{APPRENTICE}: it was unsure: its mean logprob -2 is below -1",)
    await shop.decide("promote", version=APPRENTICE)  # the run keeps its threshold
    await shop.call("r", temperature=0.5, **more)
    assert [e.status for e in await shop.calls("r")][3:] == ["unsure", "complete"]


async def test_a_killed_gateway_asks_the_provider_once(open_shop: OpenShop) -> None:
    """The record of the master's answer is on the log, the agent has not got it, and repeats the call."""
    shop = await open_shop(crash_at="gateway.before_answer:2")
    shop.server.fail_with = 400
    await shop.open("r")
    await shop.call("r")
    with pytest.raises(httpx.HTTPError):
        await shop.call("r", temperature=0.5)
    shop.gateway.wait()
    await anyio.to_thread.run_sync(shop.gateway.start)
    answer = await shop.call("r", retry=True, temperature=0.5)
    assert answer.json() == completion()
    assert len(shop.provider.got) == 2
    assert (await shop.opened("r")).pinned == APPRENTICE
    assert [e.policy_version for e in await shop.calls("r")] == [MASTER, MASTER]


async def test_detected_runs_are_taken_over_too(open_shop: OpenShop) -> None:
    shop = await open_shop(**{"detection.enabled": True, "detection.idle_s": 30.0})
    url, said = "/v1/chat/completions", list(CHAT["messages"])
    for turn in range(3):
        shop.server.fail_with = 400 if turn == 1 else 0
        answer = (await shop.client.post(url, json={**CHAT, "messages": said})).json()
        said += [answer["choices"][0]["message"], {"role": "user", "content": f"b{turn}"}]
    (opened,) = [r.event for r in await shop.broker.read(TrajectoryOpened)]
    assert (opened.model, opened.asked) == ("tictactoe", "master")
    assert [e.policy_version for e in await shop.calls(opened.trajectory)] == [APPRENTICE, MASTER, APPRENTICE]


async def test_a_group_keeps_the_name_that_it_was_opened_with(open_shop: OpenShop) -> None:
    """Its agent knows the master only, and so may its key."""
    keys = (key_config("a", models=("master",)), key_config("b"), key_config("op", role="operator"))
    shop = await open_shop(promote=False, keys=keys)

    async def get(path: str, key: str) -> tuple[int, Any]:
        answer = await shop.client.get(f"/v1/{path}", headers={"authorization": f"Bearer {key}"})
        return answer.status_code, answer.json()

    shop.client.headers["authorization"] = "Bearer op"
    await shop.decide("promote", version=APPRENTICE)
    shop.client.headers["authorization"] = "Bearer a"
    for name in ("r1", "r2"):
        await shop.open(name, group="g")
    assert (await get("groups/g?model=master", "b"))[0] == 404
    for path, key in (("groups/g", "a"), ("groups/g?model=master", "op"), ("groups/g?model=tictactoe", "op")):
        status, group = await get(path, key)
        assert (status, group["status"]) == (200, "waiting")
    ended: Any = {"project": PROJECT, "group": "g", "model": "tictactoe", "trajectories": ("r1", "r2")}
    await shop.broker.publish(GroupDiscarded(**ended, reason="no_variance", by="trainer"))
    assert (await get("groups/g", "a"))[1] == {
        **group,
        "model": "master",
        "status": "discarded",
        "reason": "no_variance",
    }
    await publish_adapter(shop.broker, 2, groups=("g",))

    async def trained() -> bool:  # the gateway reads the checkpoint
        return bool((await get("groups/g?model=master", "op"))[1]["version"] == "tictactoe@2")

    await until(trained)
    assert (await get("groups/g", "a"))[1] == {**group, "model": "master", "status": "trained"}
    (policy,) = (await get("policies", "a"))[1]["data"]
    assert "tictactoe" not in json.dumps(policy)
    assert (policy["version"], policy["step"], policy["decision"]["action"]) == (None, None, "promote")
    opened = await shop.open("r3")
    for key, status in (("a", 403), (opened["api_key"], 404)):
        run = (await get("trajectories/r3", key))[1]
        assert (run["model"], run["pinned"]) == ("master", None)
        shop.client.headers["authorization"] = f"Bearer {key}"
        answer = await shop.call("r3", model="nowhere")
        assert (answer.status_code, "tictactoe" in answer.text) == (status, False)


async def test_calls_make_up_a_groups_members_whoever_answers_them(open_shop: OpenShop) -> None:
    """The members are runs of the side that answered, whatever was decided since."""
    shop = await open_shop()

    async def complete(*members: tuple[str, str]) -> int:
        bodies = []
        for name, source in members:
            choice = (await shop.call(source)).json()["choices"][0]
            bodies.append({"id": name, "exchanges": [choice["journeywork"]], "reward": 1.0})
        return len((await shop.post("/v1/groups/g/complete", model="master", trajectories=bodies))["data"])

    for source in ("s1", "s2"):
        await shop.open(source, references=True)
    assert await complete(("m1", "s1")) == 1
    await shop.decide("promote", version=MASTER)
    assert await complete(("m2", "s2")) == 1
    for name in ("m1", "m2"):
        opened, (call,) = await shop.opened(name), await shop.calls(name)
        assert (opened.model, opened.asked, opened.pinned) == ("tictactoe", "master", APPRENTICE)
        assert call.policy_version == APPRENTICE
