"""Access to runs by key, and what a caller without a valid key learns and costs."""

import socket
from typing import Any

import httpx

from pipeline.events import PolicyPromoted, TrajectoryOpened
from pipeline.log.broker import Broker
from tests.conftest import NatsServer
from tests.rollout_gateway.conftest import GatewayProcess, StartGateway
from tests.rollout_gateway.kit import error, key_config

KEYS = (key_config("alice"), key_config("bob"), key_config("boss", role="operator"))
LET_IN = 503
"""A model call that is let in finds no inference server within `replicas.wait_s`."""


class Caller:
    """A client with a key."""

    def __init__(self, gateway: GatewayProcess, key: str) -> None:
        self._url, self._headers = gateway.url, {"authorization": f"Bearer {key}"} if key else {}

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        with httpx.Client(verify=False, timeout=60) as client:
            return client.request(method, self._url + path, json=body, headers={**self._headers, **headers})

    def open(self, **body: Any) -> dict[str, Any]:
        reply = self.ask("POST", "/v1/trajectories", {"model": "tictactoe", **body})
        assert reply.status_code == 201, reply.text
        return dict(reply.json())

    def status(self, method: str, path: str, body: Any = None, **headers: str) -> int:
        return self.ask(method, path, body, **headers).status_code

    def call(self, path: str = "/v1/chat/completions", model: str = "tictactoe", **headers: str) -> int:
        return self.status("POST", path, {"model": model, "messages": []}, **headers)

    def about(self, run: str) -> list[int]:
        """Statuses of everything that can be done to a run, completing it last."""
        return [
            self.status("GET", f"/v1/trajectories/{run}"),
            self.call(f"/t/{run}/v1/chat/completions"),
            self.call(**{"x-journeywork-trajectory": run}),
            self.status("POST", "/v1/groups/g/complete", {"trajectories": [{"id": run}]}),
            self.status("POST", f"/v1/trajectories/{run}/complete", {"reward": 1}),
        ]


def forged(key: str) -> str:
    """A trajectory's key with another signature."""
    name, _, _ = key.partition(".")
    return name + "." + "A" * 32


def test_a_forged_key_reads_nothing_from_the_log(start_front: StartGateway, nats_server: NatsServer) -> None:
    """It is answered alike, and at once, while there is no log to read."""
    gateway = start_front()
    opened = gateway.open(id="run")
    nats_server.kill()
    try:
        for run in ("run", "unknown"):
            for key in (forged(opened["api_key"]), "jwr-bm9uZQ." + "B" * 32):
                assert Caller(gateway, key).about(run)[:3] == [401] * 3
    finally:
        nats_server.start()


def test_a_body_is_not_read_before_the_key_is_checked(start_front: StartGateway) -> None:
    gateway = start_front(keys=KEYS)
    address = ("127.0.0.1", gateway.config.gateway.port)
    expect = "Expect: 100-continue\r\n"
    good = "Authorization: Bearer alice\r\n"
    for path, headers, size, status in (
        *((path, expect, 60_000_000, 401) for path in ("/v1/chat/completions", "/t/x/v1/messages", "/v1/trajectories")),
        ("/v1/chat/completions", "", 60_000_000, 401),
        ("/v1/chat/completions", good + expect, 100_000, 100),
        ("/v1/trajectories", good, 60_000_000, 413),  # more than a control call takes
        ("/nowhere", "", 60_000_000, 404),
    ):
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {size}\r\n\r\n"
        with socket.create_connection(address, timeout=60) as client:
            client.sendall(head.encode())
            assert int(client.recv(65536)[9:12]) == status, (path, headers)


def test_a_key_is_for_its_models(start_front: StartGateway) -> None:
    operator_key = key_config("o", role="operator", models=("tictactoe",))
    gateway = start_front(keys=(key_config("a", models=("tictactoe",)), key_config("b"), operator_key))
    key, other = Caller(gateway, "a"), Caller(gateway, "b")
    statuses = [key.call(model=m) for m in ("tictactoe", "tictactoe@0", "chess", "chess@0")]
    assert statuses == [LET_IN, LET_IN, 403, 403]
    assert key.status("POST", "/v1/trajectories", {"model": "chess"}) == 403
    assert other.status("POST", "/v1/trajectories", {"model": "chess"}) == 201
    key.open()
    nowhere = key.ask("POST", "/v1/trajectories", {"model": "nowhere"})
    assert (nowhere.status_code, "chess" in nowhere.text) == (403, False)
    statuses = [key.status("GET", f"/v1/models/{m}") for m in ("tictactoe", "tictactoe@0", "chess", "chess@0")]
    assert statuses == [200, 200, 404, 404]
    assert key.ask("GET", "/v1/models/chess").text == key.ask("GET", "/v1/models/xxxxx").text.replace("xxxxx", "chess")
    run = Caller(gateway, key.open()["api_key"])
    for caller in (key, run):
        for path in ("/v1/models", "/v1/models/nowhere", "/health", *(["/v1/policies"] if caller is key else [])):
            said = caller.ask("GET", path).text
            assert ("chess" in said, caller.status("GET", "/v1/models/chess")) == (False, 404), (path, said)
    assert [p["model"] for p in other.ask("GET", "/v1/policies").json()["data"]] == ["tictactoe", "chess"]
    operator = Caller(gateway, "o")
    assert operator.status("POST", "/v1/policies/chess/follow", {}) == 403
    assert operator.status("POST", "/v1/policies/tictactoe/follow", {}) == 200
    names = [{m["id"] for m in c.ask("GET", "/v1/models").json()["data"]} for c in (key, other)]
    assert names == [{"tictactoe", "tictactoe@0"}, {"tictactoe", "tictactoe@0", "chess", "chess@0"}]


def test_calls_of_a_run_count_as_its_keys_calls(start_front: StartGateway) -> None:
    gateway = start_front(keys=(key_config("a", calls_per_minute=3),))
    run = Caller(gateway, "a").open()
    own = Caller(gateway, run["api_key"])
    assert [own.call() for _ in range(6)] == [LET_IN, LET_IN, 429, 429, 429, 429]
    assert Caller(gateway, "a").call() == 429


def test_a_request_about_many_runs_counts_as_so_many_calls(start_front: StartGateway) -> None:
    """It completes them, ranks them, or takes calls of them for a run or for a member of a group."""
    keys = [key_config(k, role="operator", calls_per_minute=3) for k in ("group", "run", "member")]
    feedback = key_config("ranking", role="feedback", calls_per_minute=3)
    gateway = start_front(keys=(*keys, feedback, key_config("o", role="operator")))
    made = {"exchanges": [{"trajectory": str(n), "reply": "r"} for n in range(64)]}
    operator = Caller(gateway, "o")
    operator.open(id="made")
    for status, wrong in ((400, {"trajectories": [{"id": "a"}] * 2}), (413, {**group_of(64), "task": "t" * 300_000})):
        assert operator.status("POST", "/v1/groups/g/complete", wrong) == status
    for key, path, body, status in (
        ("group", "/v1/groups/g/complete", group_of(64), 200),
        ("ranking", "/v1/feedback", ranking_of(64), 201),
        ("run", "/v1/trajectories/made/complete", made, 400),  # its calls are none that may be referred to
        ("member", "/v1/groups/h/complete", {"trajectories": [{"id": "x", **made}], "model": "tictactoe"}, 400),
    ):
        caller = Caller(gateway, key)
        assert caller.status("POST", path, body) == status, key
        refused = caller.ask("GET", "/v1/models")
        # The key may make 3 calls a minute, and spent 64: 61 calls more than there were, at 20 s each.
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 1000


def group_of(size: int) -> dict[str, Any]:
    """A group of runs that completing it opens."""
    member = {"reward": 1, "batch": {"id": "b", "groups": ["g"]}}
    return {"trajectories": [{"id": str(n), **member} for n in range(size)], "model": "tictactoe"}


def ranking_of(size: int) -> dict[str, Any]:
    return {"ranking": [str(n) for n in range(size)]}


async def test_a_decision_is_by_the_key_that_made_it(start_front: StartGateway, broker: Broker) -> None:
    gateway = start_front(keys=KEYS)
    assert Caller(gateway, "boss").status("POST", "/v1/policies/tictactoe/follow", {"by": "someone else"}) == 200
    Caller(gateway, "alice").open(id="mine")
    (decided,), (opened,) = await broker.read(PolicyPromoted), await broker.read(TrajectoryOpened)
    assert (decided.event.by, opened.event.owner, opened.event.key_completes) == ("boss", "alice", False)


def test_rewards_have_a_bound(start_front: StartGateway) -> None:
    gateway = start_front(max_reward=10.0)
    for body in (
        {"reward": 1e9},
        {"reward": -10.5},
        {"rewards": {"style": 11}},
        {"rewards": {str(n): 10 for n in range(200)}},
        {"rewards": {"a": -6, "b": -5}},
    ):
        gateway.open(id="r", group="g")
        assert error(gateway.complete("r", **body)) == (400, "reward_out_of_range")
        group = {"trajectories": [{"id": "r", **body}]}
        assert httpx.post(f"{gateway.url}/v1/groups/g/complete", json=group).status_code == 400
    for body in (
        {"rewards": {str(n): 0 for n in range(257)}},
        {"metrics": {str(n): 0 for n in range(257)}},
        {"metrics": {"large": 1e308}},
    ):
        assert error(gateway.complete("r", **body)) == (400, "invalid_body")
    refused = gateway.complete("r", metrics={f"{n:03}{'é' * 180}": 0 for n in range(50)})  # each group holds them all
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_name")
    for text, said in (
        ('{"metrics": {"a": 1e999}}', "$.metrics[...]"),
        ('{"metrics": {"a": 1, "b": 1e308}}', "$.metrics[...]"),
        ('{"rewards": {"a": -1e999}}', "$.rewards[...]"),
        ('{"rewards": {"a": -Infinity}}', "JSON has no NaN and no Infinity"),
        ('{"reward": 1%s}' % ("0" * 400), "$.reward"),
        ('{"metadata": {"a": [1, NaN]}}', "JSON has no NaN and no Infinity"),
    ):
        refused = httpx.post(f"{gateway.url}/v1/trajectories/r/complete", content=text)
        assert refused.status_code == 400
        assert said in refused.json()["error"]["message"]
    for field in ("rewards", "metrics"):
        unnamed = gateway.complete("r", **{field: {"a\nb": 1.0}})
        assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, field)
    # Nothing adds them up where there is a `reward`.
    assert gateway.complete("r", reward=-10, rewards={"style": 10, "care": 9}).status_code == 200


def test_a_body_that_is_not_meant_is_told_why(start_front: StartGateway) -> None:
    """No field is ignored: a misspelt `reward` would end the run without one."""
    gateway = start_front()
    gateway.open(id="r", group="g")
    counts = "`$.group_size`"
    for path, body, field, said in (
        ("trajectories/r/complete", {"rewrad": 1}, "rewrad", "unknown field `rewrad`"),
        ("trajectories", {"model": "tictactoe", "grop": "g"}, "grop", "unknown field `grop`"),
        ("groups/g/complete", {"trajectories": [], "reward": 1}, "reward", "unknown field `reward`"),
        ("groups/g/complete", {"trajectories": [{"id": "r", "rewrad": 1}]}, "trajectories[0].rewrad", "`rewrad`"),
        ("policies/tictactoe/promote", {"versoin": "tictactoe@0"}, "versoin", "unknown field `versoin`"),
        *(
            ("trajectories", {"model": "tictactoe", "group_size": n}, "group_size", counts)
            for n in (1.5, -1, 2**31, "x")
        ),
    ):
        refused = httpx.post(f"{gateway.url}/v1/{path}", json=body)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_body", field), error
        assert said in error["message"]
    opening = {"model": "tictactoe@0"}
    error = httpx.post(f"{gateway.url}/v1/trajectories", json=opening).json()["error"]
    assert "Open with the model 'tictactoe' and `pinned`: 'tictactoe@0'" in error["message"]
    opening = {"model": "tictactoe", "pinned": "tictactoe"}
    error = httpx.post(f"{gateway.url}/v1/trajectories", json=opening).json()["error"]
    assert (error["param"], error["message"].endswith("There are: tictactoe@0.")) == ("pinned", True), error
    assert httpx.get(f"{gateway.url}/v1/trajectories/r").json()["status"] == "open"
