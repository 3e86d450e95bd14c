"""Who may see the dashboard, and whose requests it takes."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from pipeline.config import ConfigError
from tests.store.kit import fill, run_of_one_step
from tests.store.showing.dashboard.conftest import URL, Open

OPERATOR, AGENT, EXPIRED = "jw-operator", "jw-agent", "jw-expired"


def entry(key: str, role: str, more: str = "") -> str:
    """A key in a file of keys."""
    return f'[[keys]]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\nrole = "{role}"\n{more}\n'


@pytest.fixture
def keys(run_dir: Path) -> None:
    (run_dir / "keys.toml").write_text(
        entry(OPERATOR, "operator") + entry(AGENT, "agent") + entry(EXPIRED, "operator", 'expires = "2020-01-01"')
    )


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("key", [AGENT, EXPIRED, "guess", ""])
def test_only_an_operators_key_opens_the_pages(own_client: TestClient, key: str) -> None:
    page = own_client.get("/overview")
    assert (page.headers["location"], page.text.endswith(" See /sign-in\n")) == ("/sign-in", True)
    assert "programs send it as bearer token" in page.text
    assert own_client.get("/").text == "See /overview\n"
    assert own_client.get("/overview.json").status_code == 401
    assert own_client.get("/overview.json", headers={"authorization": f"Bearer {key}"}).status_code == 401
    assert own_client.post("/sign-in", data={"key": key}, headers={"origin": URL}).status_code == 401


@pytest.mark.usefixtures("keys")
def test_a_browser_signs_in_and_out(own_client: TestClient) -> None:
    answer = own_client.post("/sign-in", data={"key": OPERATOR}, headers={"origin": URL})
    assert answer.status_code == 303
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert OPERATOR not in cookie
    assert own_client.get("/overview").status_code == 200
    own_client.post("/sign-out", headers={"origin": URL})
    assert own_client.get("/overview").status_code == 303


@pytest.mark.usefixtures("keys")
def test_a_revoked_key_ends_its_sessions(own_client: TestClient, run_dir: Path) -> None:
    own_client.post("/sign-in", data={"key": OPERATOR}, headers={"origin": URL})
    (run_dir / "keys.toml").unlink()
    assert own_client.get("/overview").headers["location"] == "/sign-in"


@pytest.mark.parametrize(("own_keys", "sees"), [(True, ["free", "here", "mine"]), (False, ["free", "here"])])
def test_runs_are_compared_with_those_that_the_key_opens(
    open_dashboard: Open, run_dir: Path, own_keys: bool, sees: list[str]
) -> None:
    def run_with(name: str, *keys: str) -> None:
        fill(run_dir.parent / name, *run_of_one_step()[:2])
        if keys:
            (run_dir.parent / name / "keys.toml").write_text("".join(entry(key, "operator") for key in keys))

    run_with("free")
    run_with("mine", OPERATOR, "jw-other")
    run_with("theirs", "jw-other")
    run_with("spoiled", "jw-other")
    broken(run_dir.parent / "spoiled" / "keys.toml")
    headers = {}
    if own_keys:
        run_with("here", OPERATOR)
        headers = {"authorization": f"Bearer {OPERATOR}"}
    client = open_dashboard()
    assert client.get("/compare.json", headers=headers).json()["runs"] == sees
    for run in ("free", "mine", "theirs", "spoiled"):
        answer = client.get(f"/compare.json?side={run}/main", headers=headers)
        assert (run, answer.status_code) == (run, 200 if run in sees else 404)


def broken(file: Path) -> None:
    file.write_text("keys = [")


def unreadable(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("spoil", [broken, unreadable])
def test_no_key_opens_the_pages_while_their_file_cannot_be_read(
    own_client: TestClient, open_dashboard: Open, run_dir: Path, spoil: Callable[[Path], None]
) -> None:
    """Nor does a dashboard start with it."""
    known = {"authorization": f"Bearer {OPERATOR}"}
    assert own_client.get("/groups.json", headers=known).status_code == 200
    spoil(run_dir / "keys.toml")
    for headers in (known, {"authorization": "Bearer guess"}):
        refused = own_client.get("/groups.json", headers=headers)
        assert (refused.status_code, "keys.toml" in refused.text) == (503, True)
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        open_dashboard()


def test_a_first_file_of_keys_that_cannot_be_read_closes_the_pages(own_client: TestClient, run_dir: Path) -> None:
    assert own_client.get("/overview").status_code == 200
    broken(run_dir / "keys.toml")
    assert own_client.get("/overview.json").status_code == 401


def test_without_keys_only_the_loopback_interface_is_served(open_dashboard: Open) -> None:
    with pytest.raises(ConfigError, match="journeywork keys add"):
        open_dashboard("0.0.0.0")


_OTHER_HOSTS = ("evil.example", "127.0.0.1.evil.example", "10.0.0.1")
_UNCLEAR_HOSTS = ("x@127.0.0.1", "127.0.0.1:18702:1", "127.0.0.1:", "localhost:0", "a b", "[::1]x", "")


@pytest.mark.parametrize(
    ("hosts", "status"),
    [*(([h], 421) for h in _OTHER_HOSTS), *(([h], 400) for h in _UNCLEAR_HOSTS), (["localhost", "evil.example"], 400)],
)
def test_another_host_or_one_that_two_programs_could_read_in_two_ways_is_refused(
    client: TestClient, hosts: list[str], status: int
) -> None:
    assert client.get("/overview", headers=[("host", host) for host in hosts]).status_code == status


@pytest.mark.parametrize(
    "headers", [{"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}, {}]
)
@pytest.mark.parametrize("path", ["/policies/m", "/label/g0", "/correct/t0", "/sign-out", "/sign-in"])
def test_a_change_that_another_page_asks_for_is_refused(client: TestClient, headers: dict[str, str], path: str) -> None:
    assert client.post(path, data={"action": "promote"}, headers=headers).status_code == 403


def test_a_decision_without_a_gateway_says_so(client: TestClient) -> None:
    for path, form, status in (
        ("/policies/m", {"action": "promote", "version": "m@1"}, 503),
        ("/label/g0", {"score:t0": "1"}, 503),
        ("/correct/t0", {"call": "0", "correction": "b2"}, 503),
        ("/policies/m", {"action": "x"}, 400),
        ("/label/g0", {"score:t0": "2"}, 400),
    ):
        answer = client.post(path, data=form, headers={"origin": URL})
        assert (answer.status_code, "journeywork up" in answer.text) == (status, status == 503)


@pytest.mark.parametrize("path", ["overview", "overview.json", "groups?task=win", "none"])
@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
        {"origin": "https://evil.example"},
    ],
)
def test_another_page_reads_nothing(client: TestClient, headers: dict[str, str], path: str) -> None:
    """Not even by the time that an answer takes: the history is not asked."""
    answer = client.get(f"/{path}", headers=headers)
    assert answer.status_code == 403
    assert "another web page" in answer.text


@pytest.mark.parametrize("path", ["groups?task=win", "compare?side=here/main"])
def test_a_link_of_another_page_is_followed_by_the_dashboard_itself(client: TestClient, path: str) -> None:
    """The first answer is the same for all histories; the page is asked for by the browser again, from here."""
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    answer = client.get(f"/{path}", headers=headers)
    assert answer.status_code == 200
    assert 'http-equiv="refresh"' in answer.text
    assert "g0" not in answer.text
    again = client.get(f"/{path}", headers={"sec-fetch-site": "same-origin", "sec-fetch-mode": "navigate"})
    assert "http-equiv" not in again.text
