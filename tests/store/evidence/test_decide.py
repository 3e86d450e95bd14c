"""Two versions in use, compared by their runs, on a real log, gateway and store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from pipeline.config import save
from pipeline.running.runs import SETTINGS
from store.evidence import decide
from store.evidence.comparison import Evidence
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
    for number in range(runs):
        opened = here.gateway.open(id=f"{name}-{number}", split="val")
        with here.gateway.agent(opened) as agent:
            answer = agent.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "a1=x"}], max_tokens=2
            )
        reward = float(answer.model == better)
        assert here.gateway.complete(opened["id"], reward=reward).status_code == 200
    here.until("trajectories.json?q=", lambda data: _stored(here, name) == runs)


def _stored(here: Living, name: str) -> int:
    query = f"SELECT count(*) FROM trajectories WHERE trajectory LIKE '{name}-%' AND outcome <> 'open'"
    (row,) = sql.connect(here.gateway.config).execute(query).fetchall()
    return int(row[0])


def decision(here: Living) -> dict[str, Any]:
    return dict(httpx.get(f"{here.gateway.url}/v1/policies").json()["data"][0]["decision"] or {})


_OF = ("begin", CANDIDATE, CONTROL, "--percent", "50", "--metric")
BEGIN = (*_OF, "reward")


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
    play(found, 60, better, verdict)
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
    assert finding.candidate_runs + finding.control_runs == 60
    assert decided["by"] == ("a person" if approval else "")
    assert run(found, "watch", model) == 2  # it is over
    found.until("overview.json", lambda data: _recorded(found, decided["request"]))
    capsys.readouterr()
    assert run(found, "check") == 0
    checked = capsys.readouterr().out
    assert f"{verdict} of {CANDIDATE}: equal" in checked
    assert " decisions, 0 different\n" in checked
    for number in range(3):  # what is said later changes nothing
        about = f"{found.gateway.url}/v1/trajectories/{verdict}-{number}/feedback"
        assert httpx.post(about, json={"name": "late", "value": 1.0}).status_code == 201
    found.until("overview.json", lambda data: _said_late(found, verdict) == 3)
    assert run(found, "check") == 0
    assert f"{verdict} of {CANDIDATE}: equal" in capsys.readouterr().out


def _said_late(here: Living, name: str) -> int:
    query = f"SELECT count(*) FROM signals WHERE name = 'late' AND trajectory LIKE '{name}-%'"
    (row,) = sql.connect(here.gateway.config).execute(query).fetchall()
    return int(row[0])


def _recorded(here: Living, request: str) -> bool:
    rows = sql.connect(here.gateway.config).execute("SELECT request FROM policy_promoted").fetchall()
    return (request,) in rows


@pytest.mark.slow
def test_a_second_watcher_decides_nothing(found: Living, capsys: pytest.CaptureFixture[str]) -> None:
    """As after a kill between the decision and its answer."""
    assert run(found, *BEGIN) == 0
    config = found.gateway.config
    gateway = decide.GatewayApi(found.gateway.url)
    begun = decide._in_force(gateway, MODEL)
    seen = msgspec.structs.replace(decide._look(config, begun), verdict="hold")
    decide._publish(gateway, begun, seen)
    first = decision(found)
    decide._publish(gateway, begun, msgspec.structs.replace(seen, verdict="promote", until=seen.until + 1))
    assert "another watcher" in capsys.readouterr().out
    assert decision(found) == first


@pytest.mark.slow
def test_what_can_t_be_compared_begins_nothing(found: Living, capsys: pytest.CaptureFixture[str]) -> None:
    before = decision(found)
    for wrong, said in (
        (
            ("begin", CANDIDATE, CANDIDATE, "--percent", "50", "--metric", "reward"),
            "two versions of one model",
        ),
        (
            ("begin", CANDIDATE, "chess@1", "--percent", "50", "--metric", "reward"),
            "two versions of one model",
        ),
        (("begin", CANDIDATE, CONTROL, "--percent", "100", "--metric", "reward"), "both versions need runs"),
        ((*_OF, "rewrd"), "the metrics rewrd can't be computed: Binder Error"),
        ((*_OF, "rewrd"), ", sampled_tokens, "),
        ((*_OF, "rewrd"), "metrics['…'], rewards['…'] and feedback['…'].\n"),
        ((*_OF, "(SELECT count(*) FROM read_text('/etc/hostname'))"), "without a query"),
        ((*_OF, "reward) AS DOUBLE), CAST((reward"), "without a query"),
        ((*_OF, "reward; SELECT 1"), "can't be computed"),
        ((*_OF, "sum(reward) OVER ()"), "or a window"),
        ((*BEGIN, "--range", "1", "1"), "low < high"),
        ((*BEGIN, "--guard", "sampled_tokens:0:20"), "such as sampled_tokens:0:2000:higher:100\n"),
        ((*BEGIN, "--guard", "sampled_tokens:0:x:higher:1"), "is not SQL:LOW:HIGH"),
    ):
        assert run(found, *wrong) == 2, wrong
        assert said in capsys.readouterr().err
    assert decision(found) == before
    assert run(found, "begin", f"{MODEL}@77", CONTROL, "--percent", "50", "--metric", "reward") == 1
    assert f"waiting until inference servers hold {MODEL}@77 and {CONTROL}\n" in capsys.readouterr().err
