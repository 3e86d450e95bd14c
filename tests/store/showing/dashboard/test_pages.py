"""Every page shows the history, as HTML and as JSON, and refuses what it cannot show."""

import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from pipeline.config import Config, ModelConfig, UiConfig
from pipeline.events import pack_mask, pack_seqs
from pipeline.running.gateway_api import GatewayApi, GatewayError
from store.showing.dashboard.gateway import Gateway
from store.showing.dashboard.server import _SINGLE
from store.showing.pages import groups as reading_groups
from store.showing.pages import trajectories as reading
from store.showing.pages.errors import PageError
from store.showing.pages.history import History
from tests.store.kit import checkpoint, completed, exchange, fill, opened, promoted, run_of_one_step, scored
from tests.store.showing.dashboard.conftest import LISTS, URL, Open

PAGES = (*LISTS, "group/g0", "group/g9", "trajectory/t0", "checkpoint/m@1", "sign-in")


def test_the_pages_that_are_tested_are_those_of_the_navigation(client: TestClient) -> None:
    navigation = re.search(r'<nav aria-label="Pages">.*?</nav>', client.get("/overview").text, re.S)
    assert navigation
    assert set(re.findall(r'href="/(\w+)"', navigation[0])) == set(LISTS)
    assert {page.partition("/")[0] for page in PAGES if "/" in page} == set(_SINGLE)


@pytest.mark.parametrize("page", PAGES)
def test_every_page_has_landmarks_and_loads_nothing_from_elsewhere(client: TestClient, page: str) -> None:
    answer = client.get(f"/{page}")
    assert answer.status_code == 200, answer.text
    for landmark in ("<header", "<nav", "<main", '<html lang="en"', "<h1>"):
        assert landmark in answer.text
    assert "http://" not in answer.text.replace("http://127.0.0.1", "")
    assert "https://" not in answer.text
    assert "<script>" not in answer.text
    assert " style=" not in answer.text
    assert "script-src 'self'" in answer.headers["content-security-policy"]


def test_the_overview_counts_and_draws(client: TestClient) -> None:
    """Rewards, evaluations, decisions, rates, and what was spent against the gain with the limits."""
    text = client.get("/overview").text
    assert "<code>journeywork dead list</code>" in text
    assert "What it cost, and what it gained" in text
    assert "`" not in text
    page = client.get("/overview.json").json()
    assert page["model"] == "m"
    assert page["counts"].items() >= {"opened": 2, "completed": 2, "calls": 4}.items()
    # Two runs of one group share their task: they are one value, which has no interval.
    assert [(row["step"], row["trajectories"], row["mean"], row["low"]) for row in page["curve"]] == [(0, 2, 0.5, None)]
    assert page["steps"][0]["metrics"] == {"loss": 0.5}
    spent = {row["setting"]: row for row in page["spent"]}
    assert set(spent) == {"judge_usd", "gpu_hours", "sampled_tokens"}
    assert spent["judge_usd"]["spent"] > 0
    assert spent["judge_usd"]["limit"] is None
    assert [(row["entrant"], row["mean"]) for row in page["evaluations"]] == [("m@1", 0.5)]
    assert [row["action"] for row in page["decisions"]] == ["promote"]
    assert [(row["step"], row["mean"]) for row in page["staleness"]] == [(1, 0.0)]
    assert sum(row["trajectories_per_s"] for row in page["throughput"]) > 0
    assert page["policies"] is None
    assert client.get("/numbers.json").json()["counts"] == page["counts"]
    assert page["run_metrics"] == ["turns"]
    (metric,) = page["metrics"]
    assert (metric["name"], metric["step"], metric["split"], metric["mean"]) == ("turns", 0, "train", 2.0)


def test_a_group_shows_members_side_by_side_with_the_judges_words(client: TestClient) -> None:
    page = client.get("/group/g0.json").json()
    assert [(m["trajectory"], m["reward"]) for m in page["members"]] == [("t0", 1.0), ("t1", 0.0)]
    assert page["members"][0]["verdicts"][0]["explanation"] == "wins"
    assert [(s["name"], s["text"]) for s in page["members"][0]["signals"]] == [("feedback", ""), ("label", "wins")]
    assert page["members"][0]["reply"]["content"] == "x"
    assert [m["content"] for m in page["prompt"]] == ["play", "go 0"]
    ends = [(end["trajectory"], end["messages"][-1]["content"]) for end in (page["best"], page["worst"])]
    assert ends == [("t0", "x"), ("t1", "x")]
    assert page["members"][0]["run"]["metrics"] == {"turns": 2.0}
    assert page["trained_in"] == [{"version": "m@1", "step": 1, "branch": "main"}]


def test_a_trajectory_shows_each_token_with_its_logprob_and_mask(client: TestClient) -> None:
    page = client.get("/trajectory/t0.json").json()
    tokens = [(t["id"], t["logprob"], t["trained"]) for t in page["calls"][0]["tokens"]]
    assert tokens == [(3, -0.5, True), (4, -0.25, True)]
    assert [[m["role"] for m in call["messages"]] for call in page["calls"]] == [["system", "user"], ["user"]]
    assert [call["reply"]["content"] for call in page["calls"]] == ["x", "x"]
    assert (page["previous"], page["next"], page["run"]["metrics"]) == (None, "t1", {"turns": 2.0})
    assert client.get("/trajectory/t1.json").json()["previous"] == "t0"
    assert page["trained_in"] == [{"version": "m@1", "step": 1, "branch": "main"}]


def test_a_checkpoint_shows_both_ways_of_its_lineage(client: TestClient) -> None:
    page = client.get("/checkpoint/m@1.json").json()
    assert page["checkpoint"]["parent"] == "m@0"
    assert [row["group_id"] for row in page["learned"]] == ["g0"]
    assert [row["replica"] for row in page["adapters"]] == ["r0"]
    assert [row["action"] for row in page["decisions"]] == ["promote"]
    assert [row["version"] for row in client.get("/checkpoint/m@0.json").json()["children"]] == ["m@1"]


def test_the_judges_page_compares_it_with_people(client: TestClient) -> None:
    page = client.get("/judge.json").json()
    assert [(row["judge_model"], row["pairs"], row["share"]) for row in page["agreement"]] == [("judge/1", 1, 1.0)]
    assert page["measured"][0]["position_bias"] == 0.1


def test_two_runs_are_compared(open_dashboard: Open, run_dir: Path) -> None:
    fill(run_dir.parent / "other", *run_of_one_step()[:2])
    fill(run_dir, checkpoint(1, branch="stricter"))
    client = open_dashboard()
    chosen = "side=here/main&side=other/main&side=here/stricter"
    page = client.get(f"/compare.json?{chosen}&side=here").json()
    assert [side["counts"]["calls"] for side in page["sides"]] == [4, 1, 4]  # none with itself
    assert page["runs"] == ["here", "other"]
    assert page["choices"] == ["here/main", "here/stricter", "other/main"]
    assert client.get(f"/compare?{chosen}").text.count(" checked>") == 3
    assert "Choose one more" in client.get("/compare").text


_SEVEN_SIDES = "&".join(f"side=here/{i}" for i in range(7))


@pytest.mark.parametrize(
    ("status", "paths"),
    [
        (404, ("none", "group/none", "trajectory/none", "checkpoint/none", "checkpoint/m@7", "static/../server.py")),
        (404, ("overview?model=nope", "overview.json?branch=nope", "compare?side=here/nope", "compare?side=../here")),
        (400, ("groups?sort=none", "groups?page=²", "groups?page=200", "groups?step=x", "trajectory/t0?from=x")),
        (400, ("trajectories?outcome=lost", "groups?reason=boring", f"compare?{_SEVEN_SIDES}")),
        (400, tuple(f"trajectories?{form}" for form in ("least=nan", "most=x", "since=yesterday", "until=2024-13-01"))),
        (200, ("groups?reason=no_variance",)),
    ],
)
def test_what_is_not_there_is_said(client: TestClient, status: int, paths: tuple[str, ...]) -> None:
    assert {path: client.get(f"/{path}").status_code for path in paths} == dict.fromkeys(paths, status)


def test_filters_and_texts_are_data(client: TestClient) -> None:
    assert len(client.get("/groups.json?status=discarded").json()["rows"]) == 1
    assert client.get("/groups.json", params={"task": "' OR 1=1 --"}).json()["rows"] == []
    page = client.get("/groups", params={"task": '"><script>alert(1)</script>'}).text
    assert "<script>alert" not in page


@pytest.mark.parametrize(
    ("path", "order"),
    [
        ("groups?sort=group", ["g0", "g9"]),
        ("groups?sort=-group", ["g9", "g0"]),
        ("groups?step=0", ["g0"]),
        ("groups?step=1", []),
        ("trajectories?sort=reward", ["t1", "t0"]),
        ("trajectories?sort=-reward", ["t0", "t1"]),
        ("checkpoints?sort=-loss", ["m@1"]),
    ],
)
def test_lists_are_ordered_by_a_column_and_filtered_by_step(client: TestClient, path: str, order: list[str]) -> None:
    page, _, query = path.partition("?")
    rows = client.get(f"/{page}.json?{query}").json()["rows"]
    names = {"groups": "group_id", "trajectories": "trajectory", "checkpoints": "version"}
    assert [row[names[page]] for row in rows] == order
    assert client.get(f"/{path}").status_code == 200


def test_a_run_shows_the_metadata_of_its_opening_and_of_its_end(open_dashboard: Open, run_dir: Path) -> None:
    begun = opened("both", metadata=b'{"subject": "user-17", "try": 1}')
    fill(run_dir, begun, completed("both", metadata=b'{"try": 2, "won": true}'))
    client = open_dashboard()
    assert client.get("/trajectory/both.json").json()["metadata"] == {"subject": "user-17", "try": 2, "won": True}
    assert "user-17" in client.get("/trajectory/both").text


@pytest.mark.parametrize(
    ("more", "trained"),
    [
        ({}, [True, True]),
        ({"status": "cancelled"}, [False, False]),
        ({"side_call": True}, [False, False]),
        ({"forced": pack_mask([0, 1])}, [True, False]),
        ({"request": b'{"temperature": 0}'}, [False, False]),
    ],
)
def test_a_token_is_trained_by_the_trainer_s_rule(
    open_dashboard: Open, run_dir: Path, more: dict[str, Any], trained: list[bool]
) -> None:
    fill(run_dir, opened("one"), exchange("one", **more))
    call = open_dashboard().get("/trajectory/one.json").json()["calls"][0]
    assert [token["trained"] for token in call["tokens"]] == trained
    assert bool(call["untrained"]) == (trained == [False, False])


def test_the_trainers_settings_are_those_of_the_runs_model() -> None:
    """A saved file may hold what this version does not know: its runs still have a page."""
    masks = ModelConfig(name="m", trainer={"loss": {"mask_truncated": True}})
    config = Config(models=(masks, ModelConfig(name="old", trainer={"gone": 1})))
    found = [reading._trainer_of(config, model).loss.mask_truncated for model in ("m", "old", "unknown")]
    assert found == [True, False, False]


def test_groups_of_several_models_with_one_name_have_a_page_each(open_dashboard: Open, run_dir: Path) -> None:
    groups = {"model=m&project=p": ("p", "m", 1.0), "model=n": ("p", "n", 0.5), "project=q": ("q", "m", 0.25)}
    for project, model, reward in groups.values():
        of: dict[str, Any] = {"project": project, "model": model}
        run = f"{project}-{model}"
        ended = completed(run, group="shared", reward=reward, **of)
        fill(run_dir, ended, scored("shared", {run: reward}, **of), checkpoint(7, **of, groups=("shared",)))
    client = open_dashboard()
    for address, (project, model, reward) in groups.items():
        page = client.get(f"/group/shared.json?{address}").json()
        assert [(m["trajectory"], m["reward"]) for m in page["members"]] == [(f"{project}-{model}", reward)]
        assert [row["reward_mean"] for row in page["scored"]] == [reward]
        assert [row["version"] for row in page["trained_in"]] == [f"{model}@7"]
        assert len(page["others"]) == 2
    assert client.get("/group/shared?model=none").status_code == 404
    shown = client.get("/group/shared?project=q").text
    assert 'href="/group/shared?model=n&amp;project=p"' in shown
    assert 'action="/label/shared?project=q"' in shown
    for page in ("groups", "trajectories", "trajectory/p-n", "checkpoint/n@7"):
        assert 'href="/group/shared?model=n&amp;project=p"' in client.get(f"/{page}").text, page


def test_a_run_without_a_group_has_its_reward_and_its_checkpoints(tmp_path: Path) -> None:
    """Other events name the run's id where it has no group. A run that waits is a group that is not scored."""
    runs = [exchange("solo", group=""), completed("solo", group=""), completed("waits", group="")]
    step = checkpoint(2, groups=("solo",), group_seqs=pack_seqs([1]))
    fill(tmp_path, *runs, scored("solo", {"solo": 0.5}), step)
    history = History(Config(run_dir=str(tmp_path)))
    run = reading.trajectory(history, "solo", {})
    assert [row["reward"] for row in run["rewards"]] == [0.5]
    assert [row["version"] for row in run["trained_in"]] == ["m@2"]
    assert [m["run"]["trajectory"] for m in reading_groups.group(history, "solo", {})["members"]] == ["solo"]
    group = reading_groups.group(history, "waits", {})
    history.close()
    assert (group["scored"], [m["trajectory"] for m in group["members"]]) == ([], ["waits"])


@pytest.mark.parametrize("use", ["hint", "history"])
def test_a_call_is_corrected_by_a_person(client: TestClient, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    asked: list[Any] = []

    async def ask(gateway: Gateway, key: str, method: str, path: str, body: Any = None) -> Any:
        asked.append((path, body))
        return {"signals": [{"use": use}]}

    monkeypatch.setattr(Gateway, "_ask", ask)
    shown = client.get("/trajectory/t0").text
    assert shown.count('action="/correct/t0?') == 2
    form = {"call": "1", "correction": "b2"}
    answer = client.post("/correct/t0?from=0", data=form, headers={"origin": URL})
    assert (answer.status_code, answer.headers["location"]) == (303, f"/trajectory/t0?from=0&corrected={use}")
    ((path, body),) = asked
    assert path == "/v1/trajectories/t0/feedback"
    assert (body["call"], body["correction"], body["source"]) == (1, "b2", "dashboard")
    page = client.get(answer.headers["location"]).text
    assert "The correction is recorded" in page
    assert ("journeywork rejudge" in page) == (use == "history")
    assert "corrected" not in re.findall(r'action="/correct/[^"]*"', page)[0]


def test_a_correction_stays_with_its_run_whatever_its_name_is(open_dashboard: Open, run_dir: Path) -> None:
    """A browser would take `/correct/../label/g0` for `/label/g0`."""
    fill(run_dir, opened("../label/g0"), exchange("../label/g0"))
    shown = open_dashboard().get("/trajectory/..%2Flabel%2Fg0").text
    assert re.findall(r'action="(/correct[^"?]*)', shown) == ["/correct/..%2Flabel%2Fg0"]


def test_a_run_whose_name_ends_in_json_has_a_page_and_data(open_dashboard: Open, run_dir: Path) -> None:
    """An address with `.json` is the data of the run without that ending if there is one: no run hides its data."""
    fill(run_dir, opened("x.json"), exchange("x.json"), opened("t0.json"), exchange("t0.json"))
    client = open_dashboard()
    page = client.get("/trajectory/x.json")
    assert "<h1" in page.text
    assert 'href="/trajectory/x.json.json"' in page.text
    assert client.get("/trajectory/x.json.json").json()["trajectory"] == "x.json"
    assert client.get("/trajectory/t0.json").json()["trajectory"] == "t0"
    missing = client.get("/trajectory/none.json")
    assert (missing.status_code, missing.json()["status"]) == (404, 404)


def test_a_decision_shows_its_prompt(open_dashboard: Open, run_dir: Path) -> None:
    fill(run_dir, promoted(request="r", prompt="Play <well>.", replaces="Play."))
    client = open_dashboard()
    for page in ("decisions", "overview", "checkpoint/m@1"):
        assert client.get(f"/{page}").text.count("<pre>Play &lt;well&gt;.</pre>") == 1


@pytest.mark.anyio
@pytest.mark.parametrize("status", [0, 200, 302, 404, 502, 503, 504])
async def test_pages_about_versions_do_without_a_gateway_that_is_away(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """A proxy or another server may answer in its place. A decision then says what to do."""

    def away(*_: object) -> None:
        raise GatewayError("away", status)

    monkeypatch.setattr(GatewayApi, "ask", away)
    gateway = Gateway(Config(ui=UiConfig(gateway_url="http://gateway")))
    assert await gateway.policies("key") is None
    with pytest.raises(PageError, match=r"ui\.gateway_url" if status == 404 else "away") as refused:
        await gateway.decide("key", "m", "promote", {})
    assert refused.value.status == (status if status > 404 else 503)


@pytest.mark.anyio
async def test_a_refusal_of_the_gateway_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise GatewayError("no such model", 404, "model_not_found")

    monkeypatch.setattr(GatewayApi, "ask", refuse)
    with pytest.raises(PageError, match="no such model") as refused:
        await Gateway(Config(ui=UiConfig(gateway_url="http://gateway"))).decide("key", "m", "promote", {})
    assert refused.value.status == 404
