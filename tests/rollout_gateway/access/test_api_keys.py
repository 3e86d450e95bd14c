"""API keys: what each permits, the file and its commands."""

import hashlib
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipeline.config import ConfigError, GatewayConfig, KeyConfig
from pipeline.security.key_file import read_keys
from rollout_gateway.access import command as keys_cli
from rollout_gateway.access.api_keys import FULL_ACCESS, ApiKeys
from rollout_gateway.http.errors import ApiError
from tests.rollout_gateway.access.test_access import LET_IN, Caller
from tests.rollout_gateway.conftest import StartGateway
from tests.rollout_gateway.kit import key_config


def status(check: Callable[[], object]) -> int:
    """The status of a refusal, or 200."""
    try:
        check()
    except ApiError as error:
        return error.status
    return 200


def test_without_keys_only_loopback_is_served(tmp_path: Path) -> None:
    ApiKeys(GatewayConfig(host="127.0.0.1"))
    ApiKeys(GatewayConfig(host="::1"))
    with pytest.raises(ConfigError, match="without API keys"):
        ApiKeys(GatewayConfig(host="0.0.0.0"))
    ApiKeys(GatewayConfig(host="0.0.0.0", keys=(key_config("k"),)))
    file = tmp_path / "keys.toml"
    with pytest.raises(ConfigError, match="without API keys"):
        ApiKeys(GatewayConfig(host="0.0.0.0"), file=file)
    keys_cli.main(["add", "--name", "k", "--file", str(file)])
    ApiKeys(GatewayConfig(host="0.0.0.0"), file=file)


def test_the_digest_of_an_empty_key_is_refused(tmp_path: Path) -> None:
    """A request without a key would have that key's permissions."""
    digest = hashlib.sha256(b"").hexdigest()
    for written in (digest, digest.upper()):
        with pytest.raises(ConfigError, match="key 'k': sha256 is the digest of an empty key"):
            ApiKeys(GatewayConfig(keys=(KeyConfig(sha256=written, name="k", role="operator"),)))
    file = tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nsha256 = "{digest}"\nname = "k"\n')
    with pytest.raises(ConfigError, match="empty key"):
        ApiKeys(GatewayConfig(), file=file)


def test_requests_at_once_do_not_add_up_to_more_than_one_large_request(tmp_path: Path) -> None:
    """Their keys are checked before their bodies are read."""
    file = tmp_path / "keys.toml"
    api_keys = ApiKeys(GatewayConfig(keys=(key_config("k", calls_per_minute=10),)), file=file)
    access = [api_keys.authenticate("k") for _ in range(3)]
    assert [status(lambda a=a: api_keys.charge_runs(a, 1000)) for a in access] == [200, 429, 429]  # type: ignore[misc]
    keys_cli.main(["add", "--name", "other", "--file", str(file)])
    assert api_keys.reload(), "a change of other keys forgets nothing"
    assert status(lambda: api_keys.authenticate("k")) == 429
    ApiKeys(GatewayConfig()).charge_runs(FULL_ACCESS, 1000)


def test_keys_of_one_name_share_rate_and_runs() -> None:
    old = key_config("old", name="ci", calls_per_minute=2, models=("a",), expires="2000-01-01")
    new = key_config("new", name="ci", calls_per_minute=2, models=("b",))
    api_keys = ApiKeys(GatewayConfig(keys=(old, new)))
    assert api_keys.authenticate("new").owner == "ci"
    api_keys.charge("ci", "a")
    assert status(lambda: api_keys.authenticate("new")) == 429
    assert status(lambda: api_keys.authenticate("old")) == 401


def test_an_end_bounds_a_key() -> None:
    def moment(hours: float) -> str:
        return (datetime.now(UTC) + timedelta(hours=hours)).isoformat()

    keys = (key_config("past", expires=moment(-1)), key_config("future", expires=moment(1)))
    api_keys = ApiKeys(GatewayConfig(keys=keys))
    statuses = [status(lambda k=k: api_keys.authenticate(k)) for k in ("past", "future")]  # type: ignore[misc]
    assert statuses == [401, 200]
    charged = [status(lambda k=k: api_keys.charge(k, "m")) for k in ("past", "future", "gone")]  # type: ignore[misc]
    assert charged == [401, 200, 401]
    api_keys.charge("", "m")  # opened before there were keys
    for wrong in ({"expires": "soon"}, {"sha256": "abc"}):
        with pytest.raises(ConfigError, match="'k'"):
            ApiKeys(GatewayConfig(keys=(KeyConfig(**{"sha256": "0" * 64, "name": "k", **wrong}),)))


def test_the_file_is_read_when_it_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.toml"
    api_keys = ApiKeys(GatewayConfig(), file=file)
    assert (api_keys.required, api_keys.reload()) == (False, False)

    def run(*args: str) -> tuple[str, str]:
        keys_cli.main([*args, "--file", str(file)])
        said = capsys.readouterr()
        return said.out, said.err.rpartition(" ")[2].strip()

    scope = ["--model", "m", "--calls-only", "--expires", "2h", "--calls-per-minute", "9"]
    out, key = run("add", "--name", "a", "--role", "operator", *scope)
    assert key not in out + file.read_text()
    assert {f.stat().st_mode & 0o777 for f in tmp_path.iterdir()} == {0o600}
    assert api_keys.reload()
    access = api_keys.authenticate(key)
    assert (access.owner, access.operator, access.calls_only, set(access.models)) == ("a", True, True, {"m"})
    assert time.time() < datetime.fromisoformat(read_keys(file)[0].expires).timestamp() < time.time() + 7200
    _, other = run("add", "--name", "b")
    assert api_keys.reload()
    listed = run("list")[0].splitlines()
    assert [line.split()[:2] for line in listed] == [["a", "operator"], ["b", "agent"]]
    assert api_keys.authenticate(other).owner == "b"
    for which in ("--name", "--sha256"):  # a variable of a shell that is empty
        with pytest.raises(SystemExit):
            run("revoke", which, "")
    run("revoke", "--name", "a")
    assert api_keys.reload()
    assert [status(lambda k=k: api_keys.authenticate(k)) for k in (key, other)] == [401, 200]  # type: ignore[misc]
    run("revoke", "--sha256", hashlib.sha256(other.encode()).hexdigest()[:8])
    with pytest.raises(SystemExit):
        run("revoke", "--name", "a")
    assert api_keys.reload()
    assert status(lambda: api_keys.authenticate(other)) == 401


def test_a_file_that_breaks_or_vanishes_opens_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nsha256 = "{key_config("a").sha256}"\nname = "a"\n')
    api_keys = ApiKeys(GatewayConfig(), file=file)
    file.write_text("keys = 1")
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        api_keys.reload()
    api_keys.authenticate("a")
    file.unlink()
    assert api_keys.reload()
    assert [status(lambda k=k: api_keys.authenticate(k)) for k in ("a", "")] == [401, 401]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--expires", "5s"), "30m, 12h, 30d, 2w"),
        (("--expires", "9" * 30 + "d"), "30m, 12h, 30d, 2w"),
        (("--expires", "0d"), "30m, 12h, 30d, 2w"),
        (("--name", ""), "empty"),
        (("--name", "a\nb"), "not printable"),
        (("--name", "a\x1b[31m"), "not printable"),
        (("--calls-per-minute", "-1"), "0 (no limit) or more"),
    ],
)
def test_an_invalid_key_is_not_made(
    options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.toml"
    command = ["add", "--name", "n", "--file", str(file)]
    with pytest.raises(SystemExit) as ended:
        keys_cli.main([*command, *options])
    heard = capsys.readouterr()
    assert (ended.value.code, heard.out, file.exists()) == (2, "", False)
    assert said in heard.err
    keys_cli.main([*command, "--expires", "9999w"])


def test_keys_come_and_go_while_the_gateway_runs(start_front: StartGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway = start_front()
    assert Caller(gateway, "").status("GET", "/v1/policies") == 200

    def until(key: str, wanted: int) -> None:
        deadline = time.monotonic() + 60
        while Caller(gateway, key).status("GET", "/v1/models") != wanted:
            assert time.monotonic() < deadline
            time.sleep(0.1)  # until the gateway has looked at the file

    keys_cli.main(["add", "--name", "a", "--run-dir", str(gateway.folder)])
    key = capsys.readouterr().err.split()[-1]
    until(key, 200)
    until("none", 401)
    opened = Caller(gateway, key).open()
    own, path = Caller(gateway, opened["api_key"]), f"/v1/trajectories/{opened['id']}"
    assert (own.call(), own.status("GET", path)) == (LET_IN, 200)
    keys_cli.main(["revoke", "--name", "a", "--file", str(gateway.folder / "keys.toml")])
    until(key, 401)
    assert [own.call(), own.status("GET", path), own.status("GET", "/v1/models")] == [401] * 3


@pytest.mark.parametrize("command", [["add", "--name", "k"], ["list"], ["revoke", "--name", "k"]])
def test_a_run_that_does_not_exist_gets_no_keys(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typo = tmp_path / "rnus"
    with pytest.raises(SystemExit) as ended:
        keys_cli.main([*command, "--run-dir", str(typo)])
    assert ended.value.code == 2
    assert f"{typo} is no run: name another with --run-dir" in capsys.readouterr().err
    assert not typo.exists()
