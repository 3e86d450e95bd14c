"""The `journeyman` command: what a user meets first."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import anyio
import pytest

from pipeline.broker import Broker
from pipeline.cli import ELSEWHERE, main
from pipeline.config import NatsConfig
from pipeline.events import CheckpointPublished


def test_every_command_that_lives_elsewhere_has_its_module() -> None:
    missing = [module for module, _ in ELSEWHERE.values() if importlib.util.find_spec(module) is None]
    assert not missing


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["up", "--set", "nonsense"], 2, "section.key=value"),
        (["up", "--services", "gatway"], 2, "gatway"),
        (["up", "--config", "nothing.toml"], 2, "no settings file"),
        (["status", "--run-dir", "nowhere"], 2, "nothing was started there"),
    ],
)
def test_a_mistake_is_one_clear_line(
    args: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == code
    assert said in capsys.readouterr().err


def test_a_dry_run_shows_settings_and_commands_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["up", "--dry-run", "--run-dir", str(tmp_path), "--set", "models.0.base=somewhere"])
    out = capsys.readouterr().out
    assert "--logprobs-mode processed_logprobs" in out
    assert not list(tmp_path.iterdir())


async def provision(config: NatsConfig) -> None:
    async with Broker.connect(config) as broker:
        await broker.publish(
            CheckpointPublished(
                project="p", model="m", step=3, version="m@3", parent="m@2", batch_id="b", groups=(), config_hash="c",
                adapter="a", adapter_sha256="s", adapter_bytes=1,
            )
        )  # fmt: skip


def test_status_says_what_runs_what_waits_and_what_serves(
    tmp_path: Path, nats_config: NatsConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    anyio.run(provision, nats_config)
    state = {
        "pid": 1,
        "ready": True,
        "urls": {"nats": nats_config.url, "gateway": "http://127.0.0.1:1", "vllm": []},
        "services": {"judge": {"pid": 2**22 + 1, "state": "ready", "restarts": 0}},
    }
    (tmp_path / "state.json").write_text(json.dumps(state))
    main(["status", "--run-dir", str(tmp_path), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["policies"] == {"m": "m@3"}
    assert {row["consumer"]: row["behind"] for row in said["lag"]}["store-policy"] == 1
    assert said["services"]["judge"]["state"] == "gone"
    main(["status", "--run-dir", str(tmp_path)])
    assert "m@3" in capsys.readouterr().out


@pytest.mark.timeout(300)
def test_a_service_that_can_not_start_ends_up_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--run-dir", str(tmp_path), "--services", "store", "--set", "nats.connect_timeout_s=0.2"]
    with pytest.raises(SystemExit) as caught:
        main(["up", *flags, "--nats-url", "nats://127.0.0.1:1"])
    assert caught.value.code == 1
    assert "no NATS server answers at nats://127.0.0.1:1" in capsys.readouterr().err
