"""The master's answer as a correction of the apprentice's: allowed where the tables say `may_train`."""

from typing import Any

from pipeline.events import SignalGiven
from pipeline.log.broker import Broker
from tests.rollout_gateway.access.test_access import Caller
from tests.rollout_gateway.conftest import PROJECT, GatewayProcess
from tests.rollout_gateway.kit import error, key_config
from tests.rollout_gateway.outside.conftest import StartOutside, table
from tests.rollout_gateway.outside.provider import Provider, completion, whole
from tests.rollout_gateway.outside.test_failures import ask

CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}


def give(gateway: GatewayProcess, run: str, **body: Any) -> tuple[int, str]:
    return error(Caller(gateway, "").ask("POST", f"/v1/trajectories/{run}/feedback", {"key": "k", **body}))


def asked(gateway: GatewayProcess) -> str:
    """A run of the master with one call."""
    run = gateway.open(model="master")
    assert ask(run["base_url"], False, authorization=f"Bearer {run['api_key']}")[0] == 200
    return str(run["id"])


async def signals(broker: Broker, run: str) -> list[SignalGiven]:
    return [recorded.event for recorded in await broker.read(SignalGiven, project=PROJECT, trajectory=run)]


async def test_masters_answer_corrects_a_run_where_all_tables_permit_it(
    start_outside: StartOutside, provider: Provider, broker: Broker
) -> None:
    provider.says(whole(completion("b2")), whole(completion("", tool_calls=[CALL])))
    gateway = start_outside(table(provider, may_train=True))
    run = gateway.open()["id"]
    text, call, unanswered = asked(gateway), asked(gateway), gateway.open(model="master")["id"]
    for _ in range(2):
        assert give(gateway, run, corrected_by=text) == (201, "")
    assert give(gateway, run, corrected_by=call) == (409, "request_exists")
    assert give(gateway, run, corrected_by=call, key="another") == (201, "")
    assert give(gateway, run, corrected_by=unanswered) == (404, "exchange_not_found")
    assert give(gateway, run, corrected_by=text, correction="x") == (400, "invalid_body")
    assert give(gateway, run, corrected_by="t-no") == (404, "trajectory_not_found")
    assert [(s.kind, s.text, s.source, s.copied_from) for s in await signals(broker, run)] == [
        ("correction", "b2", "outside:master", text),
        ("correction", '{"name":"look","arguments":"{\\"at\\": 1}"}', "outside:master", call),
    ]


async def test_masters_answer_corrects_nothing_where_a_table_does_not_permit_it(
    start_outside: StartOutside, provider: Provider, broker: Broker
) -> None:
    provider.says(whole(completion("b2")))
    gateway = start_outside(table(provider, may_train=True), table(provider))
    run = gateway.open()["id"]
    assert give(gateway, run, corrected_by=asked(gateway)) == (403, "may_not_train")
    assert await signals(broker, run) == []


async def test_another_keys_run_corrects_nothing_unless_an_operator_says_so(
    start_outside: StartOutside, provider: Provider, broker: Broker
) -> None:
    """Not with a feedback key either, which may give feedback on both runs."""
    provider.says(whole(completion("b2")))
    keys = (key_config("a"), key_config("b"), key_config("desk", role="feedback"), key_config("op", role="operator"))
    gateway = start_outside(table(provider, may_train=True), keys=keys)
    run, theirs = (Caller(gateway, key).open(model=model) for key, model in (("a", "tictactoe"), ("b", "master")))
    assert ask(theirs["base_url"], False, authorization=f"Bearer {theirs['api_key']}")[0] == 200
    path, body = f"/v1/trajectories/{run['id']}/feedback", {"corrected_by": theirs["id"]}
    assert [Caller(gateway, key).status("POST", path, body) for key in ("a", "b", "desk", "op")] == [404, 404, 404, 201]
    assert [(s.by, s.text) for s in await signals(broker, run["id"])] == [("op", "b2")]
