"""What each key may do, as a table: with a run of alice's and its group, with feedback on it, and elsewhere."""

from typing import NamedTuple

from pipeline.config import KeyConfig, NatsConfig
from rollout_gateway.capture.answer_ids import new_answer_id
from tests.rollout_gateway.access.test_access import KEYS, LET_IN, Caller
from tests.rollout_gateway.api.test_feedback import signals
from tests.rollout_gateway.conftest import StartGateway
from tests.rollout_gateway.kit import error, key_config


class Rights(NamedTuple):
    """Statuses, and the code of a refusal."""

    run: list[int]
    """Of `Caller.about`: read it, call by its URL and by its header, complete its group, complete it."""
    feedback: tuple[int, str]
    elsewhere: list[int]
    """Open a run, list models, read policies, read metrics, decide about a version."""


OWNER = Rights([200, LET_IN, LET_IN, 200, 409], (201, ""), [201, 200, 200, 403, 403])
NOBODY = Rights([401] * 5, (401, "invalid_api_key"), [401] * 5)
FAN = Rights([403] * 5, (201, ""), [403] * 5)
TOKEN = Rights([200, LET_IN, LET_IN, 403, 403], (403, "key_does_not_complete"), [403, 200, 403, 403, 403])
UNKNOWN = (404, "trajectory_not_found")
RIGHTS = {
    "alice": OWNER,
    "boss": OWNER._replace(elsewhere=[201, 200, 200, 200, 200]),
    "bob": Rights([404] * 5, UNKNOWN, OWNER.elsewhere),
    "caller": Rights([403, LET_IN, LET_IN, 403, 403], (403, "wrong_role"), [403, 200, 403, 403, 403]),
    "fan": FAN,
    "chess-fan": FAN._replace(feedback=UNKNOWN),
    "its token": TOKEN,
    "its token, opened with key_completes": TOKEN._replace(run=[200, LET_IN, LET_IN, 403, 200], feedback=(201, "")),
    "the token of another run": TOKEN._replace(run=[403] * 5, feedback=(403, "wrong_key")),
    **dict.fromkeys(("", "wrong", "jwr-%.", "jwr-dW5rbm93bg." + "A" * 32, "its token, forged"), NOBODY),
}
EVERY = (
    *KEYS,
    KeyConfig(sha256=key_config("caller").sha256, name="alice", calls_only=True),
    key_config("fan", role="feedback"),
    key_config("chess-fan", role="feedback", models=("chess",)),
)


def elsewhere(caller: Caller) -> list[int]:
    return [
        caller.status(method, path, body)
        for method, path, body in (
            ("POST", "/v1/trajectories", {"model": "tictactoe"}),
            ("GET", "/v1/models", None),
            ("GET", "/v1/policies", None),
            ("GET", "/metrics", None),
            ("POST", "/v1/policies/tictactoe/follow", {}),
        )
    ]


async def test_what_each_key_may_do(start_front: StartGateway, nats_config: NatsConfig) -> None:
    gateway = start_front(keys=EVERY)
    alice, bob, fan = (Caller(gateway, name) for name in ("alice", "bob", "fan"))
    other = alice.open(id="other", key_completes=True)["api_key"]
    found, refusals = {}, set()
    for number, who in enumerate(RIGHTS):
        opened = alice.open(id=f"r{number}", group="g", key_completes="key_completes" in who)
        own = opened["api_key"]
        tokens = {"its token, forged": f"{own.partition('.')[0]}.{'A' * 32}", "the token of another run": other}
        key = tokens.get(who, own if who.startswith("its token") else who)
        caller, path = Caller(gateway, key), f"/v1/trajectories/{opened['id']}"
        feedback = error(caller.ask("POST", f"{path}/feedback", {"thumb": "up"}))
        # The answer is in no call of the run, which only those learn who may know of the run.
        answer = {"answer": f"chatcmpl-{new_answer_id(opened['id'])}", "thumb": "up"}
        of_answer = error(caller.ask("POST", "/v1/feedback", answer))
        assert of_answer == ((404, "exchange_not_found") if feedback[0] == 201 else feedback), who
        found[who] = Rights(caller.about(opened["id"]), feedback, elsewhere(caller))
        if RIGHTS[who] is NOBODY:  # runs that are open, completed or unknown look alike, whatever is done to them
            for run in ("r0", "unknown", "%00"):
                assert caller.about(run) == [401] * 5, (who, run)
                refusals.add(caller.ask("GET", f"/v1/trajectories/{run}").content)
    assert found == RIGHTS
    assert len(refusals) == 1
    assert [s.by for s in await signals(nats_config)] == ["alice", "boss", "fan", "alice"]

    # A run of another key is like one that nobody opened, and can't be taken over.
    unknown = bob.ask("GET", "/v1/trajectories/none").text
    assert bob.ask("GET", "/v1/trajectories/r0").text == unknown.replace("none", "r0")
    assert bob.call(**{"x-journeywork-trajectory": "r0", "x-journeywork-group": "g"}) == 409
    assert bob.status("POST", "/v1/trajectories", {"model": "tictactoe", "id": "r0", "group": "g"}) == 409
    assert error(bob.ask("POST", "/v1/feedback", {"ranking": ["r0", "other"]})) == UNKNOWN
    # A token names no other run. A run that a call names is opened, and completed with a key of the same name.
    elsewhere_named = {"x-journeywork-trajectory": "r0"}
    assert Caller(gateway, other).call("/t/other/v1/chat/completions", **elsewhere_named) == 403
    opening = {"x-journeywork-trajectory": "named", "x-journeywork-group": "g"}
    assert Caller(gateway, "caller").call(**opening) == LET_IN
    assert alice.status("POST", "/v1/trajectories/named/complete", {}) == 200
    # A feedback key learns nothing of the run's content, and has no other endpoint.
    (told,) = fan.ask("POST", "/v1/trajectories/other/feedback", {"thumb": "up"}).json()["signals"]
    assert told == {"trajectory": "other", "call": -1, "run": "open", "use": "history", "repeated": False}
    for path in (
        "/tokenize",
        "/v1/evaluations",
        "/v1/policies/tictactoe/promote",
        "/v1/messages",
        "/v1/responses",
        "/v1/completions",
        "/v1/messages/count_tokens",
    ):
        assert fan.status("POST", path, {"model": "tictactoe"}) == 403, path
    assert [fan.status("GET", path) for path in ("/v1/models/tictactoe", "/v1/groups/g")] == [403, 403]
    health = [Caller(gateway, key).ask("GET", "/health").json() for key in ("", "wrong", "fan", "alice")]
    assert health == [{"status": "ok", "serving": False, "log": "ok"}] * 4
    claude = Caller(gateway, "").ask("POST", "/t/r0/v1/messages", {})
    assert (claude.status_code, claude.json()["error"]["type"]) == (401, "authentication_error")


def test_a_key_owns_what_it_opened_at_every_gateway_and_after_a_restart(start_front: StartGateway) -> None:
    gateway = start_front(keys=KEYS)
    Caller(gateway, "alice").open(id="a", group="g")
    gateway.restart()
    other = start_front(folder="other", keys=KEYS)
    for replica in (gateway, other):
        assert Caller(replica, "bob").about("a") == RIGHTS["bob"].run
    assert Caller(other, "alice").about("a") == RIGHTS["alice"].run
    assert [Caller(gateway, key).status("GET", "/v1/trajectories/a") for key in ("alice", "bob")] == [200, 404]


def test_a_trajectorys_own_key_does_not_grade_it_without_keys_either(start_front: StartGateway) -> None:
    """A model that sees the key of its run can't say what the run was worth."""
    gateway = start_front()
    for trusted, status, code in ((False, 403, "key_does_not_complete"), (True, 200, "")):
        run = gateway.open(key_completes=trusted)
        path = f"/v1/trajectories/{run['id']}/complete"
        assert error(Caller(gateway, run["api_key"]).ask("POST", path, {"reward": 1})) == (status, code)
