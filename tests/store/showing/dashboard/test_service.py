"""The dashboard as a process: under `journeywork up`, and as `journeywork ui`."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import msgspec
import pytest

from pipeline.commands.main import main
from pipeline.config import Config, UiConfig, load
from pipeline.running import resolved
from pipeline.running.installations import SETTINGS
from pipeline.running.plan import SERVICES, make_plan
from pipeline.running.supervisor import STOP_ORDER, Supervisor
from tests.conftest import free_port
from tests.kits.services import service
from tests.kits.settings import with_values


def test_the_service_shows_an_empty_run_until_the_first_event(run_dir: Path) -> None:
    store = run_dir / "store"
    store.rename(run_dir / "later")
    with (
        service("store.showing.dashboard", load(run_dir / SETTINGS)) as (_, line),
        httpx.Client(base_url=msgspec.json.decode(line)["url"], timeout=60) as client,
    ):
        assert client.get("/overview.json").json()["counts"]["opened"] == 0
        for page in ("overview", "groups", "judge", "compare", "decisions"):
            assert client.get(f"/{page}").status_code == 200
        (run_dir / "later").rename(store)
        while client.get("/overview.json").json()["counts"]["opened"] != 2:
            time.sleep(0.2)  # the history is read again after a while


def test_the_command_prints_where_it_is(run_dir: Path) -> None:
    """It is stopped as the supervisor does, and ends in order."""
    command = [sys.executable, "-m", "store.showing.dashboard.command", "--run-dir", str(run_dir), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().rpartition(" ")[2].strip()
            assert httpx.get(f"{url}/overview", timeout=60).status_code == 200
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_its_port_is_the_same_at_each_start_unless_another_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        monkeypatch.setattr(resolved, "UiConfig", lambda: UiConfig(port=port), raising=False)
        config = with_values(Config(run_dir=str(tmp_path)), {"ui.port": port, "nats.url": "nats://127.0.0.1:1"})
        assert make_plan(config, ("ui",))[0].ui.port not in (0, port)
    assert make_plan(config, ("ui",))[0].ui.port == port
    assert Config().ui.port > 0


def test_up_starts_it_unless_it_is_off(tmp_path: Path) -> None:
    config = load(None, [f"run_dir={tmp_path}", "vllm.urls=['http://127.0.0.1:9']", "models.0.base=hub/base"])
    planned, specs = make_plan(config, tuple(SERVICES))
    assert planned.ui.port > 0
    spec = next(one for one in specs if one.name == "ui")
    assert spec.argv[1:3] == ("-m", "store.showing.dashboard")
    assert set(STOP_ORDER) >= {one.name for one in specs}
    Supervisor(planned, specs)._write_state()
    state = msgspec.json.decode((tmp_path / "state.json").read_bytes())
    assert state["urls"]["ui"] == f"http://127.0.0.1:{planned.ui.port}"
    off, specs = make_plan(with_values(config, {"ui.enabled": False}), tuple(SERVICES))
    assert "ui" not in {one.name for one in specs}
    Supervisor(off, specs)._write_state()
    assert "ui" not in msgspec.json.decode((tmp_path / "state.json").read_bytes())["urls"]


def test_a_dry_run_refuses_an_address_that_needs_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [f"run_dir={tmp_path}", "ui.host=0.0.0.0", "models.0.base=hub/base"]
    with pytest.raises(SystemExit):
        main(["up", "--dry-run", "--services", "ui", *(a for s in settings for a in ("--set", s))])
    assert "ui.host: without keys" in capsys.readouterr().err
