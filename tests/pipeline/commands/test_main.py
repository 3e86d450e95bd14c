"""The `journeywork` command."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from rich.console import Console

from pipeline.commands import main as cli
from pipeline.commands import status
from pipeline.commands.main import OWN, SUBCOMMANDS, main
from pipeline.config import Config, ModelConfig, NatsConfig, OutsideConfig, save
from pipeline.events import AlarmChanged, GroupDiscarded, GroupScored, Member, PolicyPromoted, TrajectoryOpened
from pipeline.log.broker import Broker
from pipeline.running.plan import SERVICES
from pipeline.running.state import ProcessState, RunState, process_start, write_state
from tests.kits.events import checkpoint, exchange
from tests.store.kit import fill


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("up --set nonsense", "section.key=value"),
        ("up --services gatway", "gatway"),
        ("up --config nothing.toml", "no settings file"),
        ("up --services judge --run-dir nowhere --set judge.api_key_env=NO_KEY", "the environment has no NO_KEY"),
        ("status --run-dir nowhere", "nothing was started there"),
        ("up --vllm-url localhost:8000", "vllm.urls: 'localhost:8000' is no HTTP address: write http://"),
        ("polic list", "there is no command 'polic'; did you mean policy? `journeywork --help` lists"),
        ("nonsense", "there is no command 'nonsense'. `journeywork --help` lists all commands"),
        ("", "query the history with SQL"),
    ],
)
def test_a_mistake_is_one_clear_line(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(command.split())
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())  # nothing was started


def test_the_commands_that_are_known_are_those_of_the_parser() -> None:
    named = " ".join(cli._parser().format_help().split())
    assert all(f" {name} " in named for name in (*OWN, *SUBCOMMANDS))


def test_help_says_what_commands_are_for_and_what_up_starts(capsys: pytest.CaptureFixture[str]) -> None:
    for command, said in (
        ("--help", ("Start:", "Look:", "Teach:", "Decide:", "Keep:")),
        ("up --help", ("vLLM", *SERVICES, "gateway.port", "127.0.0.1", "journeywork check-model", "--dry-run")),
    ):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(command.split())
        told = capsys.readouterr().out
        assert [part for part in said if part not in told] == []


def test_a_dry_run_shows_settings_and_commands_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(f"up --dry-run --services sampler --run-dir {tmp_path} --set models.0.base=somewhere".split())
    out = capsys.readouterr().out
    assert "--logprobs-mode processed_logprobs" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("services", "refused"),
    [
        # What each service checks is told of all of them at once.
        (
            "gateway,sampler,judge,store",
            {
                "gateway.public_url=nowhere": "gateway.public_url",
                'signing.keys=["SUAWRONG"]': "signing.keys",
                'judge.rewards=[{name="r", kind="python", entry="no_such_module:f"}]': "no_such_module",
                "store.dir=s3://": "store.dir",
            },
        ),
        ("judge", {"judge.anchors.file=nothing.jsonl": "nothing.jsonl"}),
        ("judge", {"judge.model=5": "judge.model: litellm knows no provider for '5'"}),
        ("trainer", {"trainer.optimizer.schedule=linear": "trainer.optimizer.schedule"}),
        ("store", {"nats.max_bytes=10": "nats.max_bytes: 10 is too small"}),
    ],
)
def test_a_dry_run_refuses_what_a_service_would_refuse(
    services: str, refused: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [part for setting in ("models.0.base=somewhere", *refused) for part in ("--set", setting)]
    # A start asks the same before it starts anything, if the base is there for a sampler.
    for how in (["--dry-run"],) if "sampler" in services else (["--dry-run"], []):
        with pytest.raises(SystemExit, match=r"^2$"):
            main(["up", *how, "--services", services, "--run-dir", str(tmp_path), *settings])
        told = capsys.readouterr().err
        assert [said for said in refused.values() if said not in told] == []
        assert {path.name for path in tmp_path.iterdir()} <= {"up.lock"}


GONE = 2**22 + 1
"""The id of no process."""


async def provision(config: NatsConfig) -> None:
    async with Broker.connect(config) as broker:
        await broker.publish(checkpoint(3))
        await broker.publish(checkpoint(1, branch="stricter"))
        await broker.publish(checkpoint(8, project="other"))
        async with broker.consume("store-policy") as taken:
            (delivery,) = await taken.batch(1, 60)
            await delivery.give_back(600)  # it stays delivered
        for model, state in (("m", "raised"), ("n", "raised"), ("n", "cleared")):
            told: Any = {"state": state, "detail": "it is far", "action": "Lower `it`."}
            await broker.publish(AlarmChanged(project="p", alarm="kl_rise", model=model, **told))
        for number in range(5):
            member = Member(trajectory=f"t{number}", reward=1.0)
            scored = GroupScored(project="p", group=f"g{number}", model="m", judge="j", members=(member,))
            await broker.publish(scored)
        for group, reason, more in (
            ("g0", "no_variance", {}),
            ("g1", "no_variance", {}),
            ("g2", "late", {}),
            ("g5", "too_small", {}),
            ("g6", "no_variance", {}),
            ("g7", "stale", {"branch": "stricter"}),
            ("g8", "validation", {"split": "val"}),
            ("g9", "stale", {"project": "other"}),
        ):
            ended: Any = {"project": "p", "trajectories": ("t",), "reason": reason, "by": "trainer", **more}
            await broker.publish(GroupDiscarded(group=group, model="m", **ended))
        for number in range(300):  # an evaluation, whose groups are the newest 256 messages
            played: Any = {"members": (Member(trajectory="v", reward=0.5, split="val"),), "split": "val"}
            await broker.publish(GroupScored(project="p", group=f"v{number}", model="m", judge="j", **played))
        split: Any = {"action": "split", "version": "m@2", "other": "m@0", "percent": 20.0}
        await broker.publish(PolicyPromoted(project="p", model="m", request="d", **split))


def started(
    run_dir: Path, services: Mapping[str, tuple[int, str]], nats: str = "nats://127.0.0.1:1", pid: int = 1
) -> None:
    """Write the state of a run. `services`: process id and state of each."""
    processes = {
        name: ProcessState(pid=number, since=process_start(number), state=state)
        for name, (number, state) in services.items()
    }
    urls: dict[str, str | tuple[str, ...]] = {"nats": nats, "gateway": "http://127.0.0.1:1", "vllm": ()}
    write_state(run_dir, RunState(pid=pid, since=process_start(pid), ready=True, urls=urls, services=processes))


def test_status_says_what_runs_what_waits_and_what_serves(
    tmp_path: Path, nats_config: NatsConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    anyio.run(provision, nats_config)
    url = str(nats_config.url)
    (tmp_path / "config.toml").write_text('project = "p"\n')
    started(tmp_path, {"judge": (GONE, "ready"), "store": (GONE, "stopped")}, url)
    with pytest.raises(SystemExit, match=r"^1$"):  # a service is gone
        main(["status", "--run-dir", str(tmp_path), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["policies"] == {"m": "m@3", "m+stricter": "m+stricter@1"}
    assert said["history"] == ["policy: No training reward yet."]
    lag = {row["consumer"]: (row["behind"], row["held"]) for row in said["lag"]}
    split = {"action": "split", "version": "m@2", "other": "m@0", "percent": 20.0}
    assert said["decided"] == {"m": split}
    assert lag["store-policy"] == (6, 1)
    assert not [row for row in said["lag"] if row["consumer"].startswith("telemetry")], "it is off"
    assert [(a["alarm"], a["model"], a["detail"]) for a in said["raised"]] == [("kl_rise", "m", "it is far")]
    counts = {"no_variance": 3, "late": 1, "too_small": 1}
    assert said["groups"] == {"m": {"newest": 7, "discarded": counts}}
    assert said["services"]["judge"]["state"] == "gone"
    started(tmp_path, {"judge": (os.getpid(), "ready"), "store": (GONE, "stopped")}, url)
    main(["status", "--run-dir", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert "policy m: m@3 is the newest, m@2 is served (split, 20 % of runs; m@0 the others)" in lines
    assert "alarm kl_rise of m: it is far. Lower it." in lines
    assert (
        "groups of m: of the newest 7 were discarded, whole or in part, 3 as no_variance (equal rewards), 1 as late, "
        "1 as too_small; docs/troubleshooting.md#nothing-trains says what to do"
    ) in lines
    rows = [line.split()[1:] for line in lines if line.strip().startswith(("judge ", "store-policy"))]
    assert rows == [["ready", str(os.getpid()), "0"], ["0", "0"], ["6", "(off)", "1"]]


@pytest.mark.parametrize("text", ["[abc]", "[/v1]", "[nats]"])
def test_status_prints_brackets_as_they_are(text: str, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    state: dict[str, Any] = {
        "running": True,
        "urls": {"gateway": "http://g", "ui": f"http://u/{text}"},
        "alarms": [f"alarm {text}"],
        "services": {"store": {"state": "gone", "pid": 1, "restarts": 0}},
        "log": f"error {text}",
    }
    status._print(Path(f"/runs/x{text}"), state, console)
    status._print(Path(f"/runs/x{text}"), state | {"lag": [], "waiting": {}, "policies": {f"m{text}": "m@1"}}, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        f"run directory /runs/x{text}, gateway",
        f"http://u/{text}",
        f"alarm {text}",
        f"error {text}",
        f"policy m{text}",
    ):
        assert part in said


def test_status_of_a_stopped_run_says_how_to_go_on_and_what_its_history_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started(tmp_path, pid=GONE, services=dict.fromkeys(("nats", "gateway", "store"), (GONE, "stopped")))
    table = OutsideConfig(name="master", url="http://127.0.0.1:1", apprentice="m")
    config = Config(run_dir=str(tmp_path), models=(ModelConfig(name="m"),), outside=(table,))
    save(config, tmp_path / "config.toml")
    opening = TrajectoryOpened(project="default", trajectory="r", model="m", group="r", asked="master", pinned="m@1")
    call = exchange("r", policy_version="m@1", step=1, started_at=20_000_000, at=50_000_000)
    steps = [checkpoint(step, started_at=step * 20_000_000, at=step * 20_000_000 + 10_000_000) for step in (1, 2, 3)]
    default = [msgspec.structs.replace(event, project="default") for event in (call, *steps)]
    fill(tmp_path, opening, *default)
    with pytest.raises(SystemExit, match=r"^1$"):
        main(["status", "--run-dir", str(tmp_path)])
    out = capsys.readouterr().out
    said = " ".join(out.split())
    assert "stopped. `journeywork up` with the same settings goes on with it" in said
    assert "http://127.0.0.1:1" not in said
    assert "log: it was stopped with the run" in said
    takeover, reward, speed, *_ = out.splitlines()
    assert takeover.startswith("The apprentice of master answered 100% of the 1 calls of the newest day.")
    assert reward == "m: No training reward yet."
    assert speed.startswith("m: Bound by ")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["pipeline.commands.main", "status", "--run-dir", "{run}"], 1),
        (["pipeline.commands.dead_letters", "list", "--run-dir", "{run}"], 1),
        (["pipeline.commands.main", "up", "--services", "store", "--config", "{run}"], 2),
        (["pipeline.commands.main", "up", "--services", "store", "--run-dir", "/proc/x"], 2),
    ],
)
def test_what_is_not_there_is_told_without_log_lines_and_tracebacks(
    command: list[str], code: int, tmp_path: Path
) -> None:
    started(tmp_path, {})
    (tmp_path / "config.toml").write_text("[nats]\nconnect_timeout_s = 0.2\n")
    args = [part.format(run=tmp_path) for part in command]
    done = subprocess.run([sys.executable, "-m", *args], capture_output=True, text=True)
    assert done.returncode == code
    said = (done.stdout + done.stderr).splitlines()
    assert not [line for line in said if line.startswith(("{", "Traceback"))]
    assert len(said) == 1 or "no NATS server answers" in said[-1]


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_service_that_can_not_start_ends_up_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--run-dir", str(tmp_path), "--services", "gateway", "--set", "nats.connect_timeout_s=0.2"]
    with pytest.raises(SystemExit, match=r"^1$"):
        main(["up", *flags, "--nats-url", "nats://127.0.0.1:1"])
    assert "no NATS server answers at nats://127.0.0.1:1" in capsys.readouterr().err
