"""Two versions in use, compared by their runs, on a real log, gateway and store."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import httpx
import msgspec
import pytest

from pipeline.config import Config, ConfigError, save
from pipeline.running.gateway_api import GatewayError
from pipeline.running.installations import SETTINGS
from store.evidence import decide
from store.evidence.comparison import Evidence, Guard
from store.reading import sql
from tests.store.showing.dashboard.living import MODEL, Living, living

CANDIDATE, CONTROL = f"{MODEL}@2", f"{MODEL}@1"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Living]:
    with living(tmp_path_factory.mktemp("decided")) as here:
        config = here.gateway.config
        save(config, Path(config.run_dir, SETTINGS))
        yield here


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests wait for the store themselves."""
    monkeypatch.setattr(decide, "_SETTLED_S", 0)


def run(here: Living, *args: str) -> int:
    where = ["--run-dir", here.gateway.config.run_dir]
    return decide.main([*args, *where, *([] if args[0] == "check" else ["--url", here.gateway.url])])


def play(here: Living, runs: int, better: str, name: str) -> None:
    """Let the gateway route `runs` runs, of which those of the version `better` get 1, the others 0."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a1=x"}], "max_tokens": 2}
    with httpx.Client(timeout=60) as client:
        for number in range(runs):
            opened = here.gateway.open(id=f"{name}-{number}", split="val")
            key = {"authorization": f"Bearer {opened['api_key']}"}
            answer = client.post(f"{opened['base_url']}/chat/completions", json=body, headers=key)
            reward = float(answer.json()["model"] == better)
            assert here.gateway.complete(opened["id"], reward=reward).status_code == 200
    until(here, f"SELECT count(*) = {runs} FROM trajectories WHERE trajectory LIKE '{name}-%' AND outcome <> 'open'")


def until(here: Living, query: str) -> None:
    """Wait until a query of the history returns true."""
    deadline = time.monotonic() + 60
    while not sql.connect(here.gateway.config).execute(query).fetchall()[0][0]:
        assert time.monotonic() < deadline, query
        time.sleep(0.2)  # what the history holds are files, which appear without a word


def decision(here: Living) -> dict[str, Any]:
    return dict(httpx.get(f"{here.gateway.url}/v1/policies", timeout=60).json()["data"][0]["decision"] or {})


_OF = ("begin", CANDIDATE, CONTROL, "--percent", "50", "--metric")
BEGIN = (*_OF, "reward", "--alpha", "0.4")
RUNS = 16
"""The hash of their ids gives each version at least 7 of them, and 6 pairs show a difference of 1 at this alpha."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("better", "verdict", "kept"), [(CANDIDATE, "promote", CANDIDATE), (CONTROL, "rollback", CONTROL)]
)
def test_the_better_version_gets_all_runs(
    found: Living, better: str, verdict: str, kept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    approval = verdict == "promote"
    assert run(found, *BEGIN, *(["--approval"] if approval else [])) == 0
    model = MODEL
    assert run(found, "watch", model, "--once") == 3  # nothing was played yet
    assert "verdict: continue" in capsys.readouterr().out
    play(found, RUNS, better, verdict)
    if approval:
        assert run(found, "watch", model, "--once") == 3
        assert "waits for" in capsys.readouterr().out
        assert run(found, "approve", model, "--by", "a person") == 0
    else:
        assert run(found, "watch", model) == 0
    decided = decision(found)
    assert (decided["action"], decided["version"]) == ("promote", kept)
    evidence = msgspec.json.decode(decided["evidence"], type=Evidence)
    (finding,) = evidence.findings
    assert evidence.verdict == verdict
    assert finding.candidate_runs + finding.control_runs == RUNS
    assert decided["by"] == ("a person" if approval else "")
    assert run(found, "watch", model) == 2  # it is over
    until(found, f"SELECT count(*) > 0 FROM policy_promoted WHERE request = '{decided['request']}'")
    capsys.readouterr()
    assert run(found, "check") == 0
    checked = capsys.readouterr().out
    assert f"{verdict} of {CANDIDATE}: equal" in checked
    assert " decisions, 0 different\n" in checked
    for number in range(3):  # what is said later changes nothing
        about = f"{found.gateway.url}/v1/trajectories/{verdict}-{number}/feedback"
        assert httpx.post(about, json={"name": "late", "value": 1.0}, timeout=60).status_code == 201
    until(found, f"SELECT count(*) = 3 FROM signals WHERE name = 'late' AND trajectory LIKE '{verdict}-%'")
    assert run(found, "check") == 0
    assert f"{verdict} of {CANDIDATE}: equal" in capsys.readouterr().out


@pytest.mark.slow
def test_a_second_watcher_decides_nothing(found: Living, capsys: pytest.CaptureFixture[str]) -> None:
    """As after a kill between the decision and its answer."""
    assert run(found, *BEGIN) == 0
    config = found.gateway.config
    gateway = decide.GatewayApi(found.gateway.url)
    begun = decide._in_force(gateway, MODEL)
    seen = msgspec.structs.replace(decide._read_until_now(config, begun), verdict="hold")
    decide._publish(gateway, begun, seen)
    first = decision(found)
    decide._publish(gateway, begun, msgspec.structs.replace(seen, verdict="promote", until=seen.until + 1))
    assert "another watcher" in capsys.readouterr().out
    assert decision(found) == first


def test_a_watch_asks_again_while_the_gateway_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    def away(*errors: GatewayError) -> Callable[[], str]:
        left = list(errors)

        def request() -> str:
            if left:
                raise left.pop(0)
            return "answered"

        return request

    gone, no_log, refused = GatewayError("gone"), GatewayError("no log", 503), GatewayError("unknown", 404)
    by_proxy = GatewayError("no gateway", 504)
    assert decide._until_answered(away(gone, no_log, by_proxy), once=False, every=0.0) == "answered"
    again = "gone (asked again in 0 s)\nno log (asked again in 0 s)\nno gateway (asked again in 0 s)\n"
    assert capsys.readouterr().err == again
    for once, error in ((True, gone), (False, refused)):
        with pytest.raises(GatewayError):
            decide._until_answered(away(error), once, every=0.0)


def test_a_guard_that_nothing_can_break_is_refused() -> None:
    endless = "x:0:inf:higher:1", "x:-inf:0:higher:1", "x:nan:0:higher:1", "x:0:1:higher:inf", "x:0:1:lower:nan"
    for guard in (*endless, " :0:1:higher:1"):
        with pytest.raises(ConfigError, match="is not SQL:LOW:HIGH"):
            decide._parse_guard(guard)


def test_the_sql_of_a_guard_may_hold_colons() -> None:
    assert decide._parse_guard("a::INT:0:1:lower:0.5") == Guard(sql="a::INT", low=0, high=1, worse="lower", margin=0.5)


def test_evidence_that_another_program_wrote_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    split = {"model": MODEL, "decision": {"action": "split", "evidence": '{"why": "mine"}', "percent": 5, "at": 1}}
    gateway: Any = type("Gateway", (), {"ask": lambda self, method, path: {"data": [split]}})()
    with pytest.raises(ConfigError, match="in force, the last decision is split"):
        decide._in_force(gateway, MODEL)
    connection = duckdb.connect()
    connection.execute(
        "CREATE TABLE policy_promoted AS SELECT 'p' project, 'm' model, '{}' evidence, '' other, 1 \"at\""
    )
    monkeypatch.setattr(decide.sql, "connect", lambda config: connection)
    monkeypatch.setattr(decide, "installation_settings", lambda *where, **sections: Config(project="p"))
    assert decide.main(["check"]) == 0
    assert capsys.readouterr().out.startswith("1 decisions have evidence of other programs")


@pytest.mark.slow
def test_what_can_t_be_compared_begins_nothing(found: Living, capsys: pytest.CaptureFixture[str]) -> None:
    before = decision(found)
    for wrong, said in (
        (("begin", CANDIDATE, CANDIDATE, "--percent", "50", "--metric", "reward"), "two versions of one model"),
        (("begin", CANDIDATE, "chess@1", "--percent", "50", "--metric", "reward"), "two versions of one model"),
        (("begin", CANDIDATE, CONTROL, "--percent", "100", "--metric", "reward"), "both versions need runs"),
        ((*_OF, "rewrd"), "the metrics rewrd can't be computed: Binder Error"),
        ((*_OF, "rewrd"), "metrics['…'], rewards['…'] and feedback['…'].\n"),
        ((*_OF, "(SELECT count(*) FROM read_text('/etc/hostname'))"), "without a query"),
        ((*_OF, "reward) AS DOUBLE), CAST((reward"), "without a query"),
        ((*_OF, "reward; SELECT 1"), "can't be computed"),
        ((*_OF, "sum(reward) OVER ()"), "or a window"),
        ((*_OF, ""), "no expression"),
        ((*BEGIN, "--range", "0", "inf"), "low < high, both finite"),
        ((*BEGIN, "--alpha", "1"), "can't be used: Expected `float` < 1.0 - at `$.plan.alpha`"),
        ((*BEGIN, "--deadline", "0"), "can't be used: Expected `float` > 0.0 - at `$.plan.deadline_s`"),
        ((*BEGIN, "--late", "2"), "the value of late runs, 2, is not within the range of reward, 0 to 1"),
        ((*BEGIN, "--max-pairs", "0"), "can't be used: Expected `int` >= 1 - at `$.plan.max_pairs`"),
        ((*BEGIN, "--guard", "sampled_tokens:0:20"), "such as sampled_tokens:0:2000:higher:100\n"),
        ((*BEGIN, "--guard", "sampled_tokens:0:x:higher:1"), "is not SQL:LOW:HIGH"),
    ):
        assert run(found, *wrong) == 2, wrong
        assert said in capsys.readouterr().err
    assert decision(found) == before
    assert run(found, "begin", f"{MODEL}@77", CONTROL, "--percent", "50", "--metric", "reward") == 1
    assert f"waiting until inference servers hold {MODEL}@77 and {CONTROL}\n" in capsys.readouterr().err
