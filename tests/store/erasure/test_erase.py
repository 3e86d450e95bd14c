"""`journeywork erase` on a real log, with a store that writes: what is deleted, what stays, and what a kill leaves."""

import contextlib
import io
import os
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import Config, NatsConfig, save
from pipeline.crash import VARIABLE
from pipeline.events import DataErased, Event, GroupDiscarded, GroupScored, Hint, encode, pack_seqs
from pipeline.log.broker import Broker
from pipeline.running.installations import SETTINGS
from store.datasets import command as dataset
from store.erasure import command, in_lake
from store.erasure.in_lake import Rewriter
from store.erasure.plan import Plan
from store.lake.commits import write_rows
from store.lake.lake import open_lake
from store.lake.table import EventTable
from store.reading import sql
from tests.conftest import NatsServer
from tests.kits.crash.points import POINTS
from tests.kits.events import letter
from tests.store import kit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ALICE = "alice@example.com"
SECRET = "zq" + secrets.token_hex(24)
"""Stands in every text of Alice's runs."""
FIGURES = (
    "SELECT * FROM steps ORDER BY step",
    "SELECT trajectory, reward, group_id FROM rewards ORDER BY ALL",
    "SELECT * FROM trajectories WHERE trajectory LIKE 'b%' ORDER BY trajectory",
    "SELECT trajectory, seq, request, sampled_ids FROM exchanges WHERE trajectory LIKE 'b%' ORDER BY ALL",
    "SELECT group_id, status, reward_mean FROM groups ORDER BY ALL",
)


def run(name: str, group: str, *, secret: str = "", size: int = 0, **fields: Any) -> list[Event]:
    """A run of one call. `size`: bytes of its request."""
    text, task = f"{secret} {secrets.token_hex(size // 2)}", f"win {secret}"
    body = {"messages": [{"role": "user", "content": f"go {text}"}]} | fields.pop("body", {})
    answer = {"choices": [{"message": {"role": "assistant", "content": f"ok {secret}"}}]}
    return [
        kit.opened(name, group=group, task=task, metadata=fields.get("metadata", b"{}")),
        kit.exchange(name, group=group, request=msgspec.json.encode(body), response=msgspec.json.encode(answer)),
        kit.signal(name, group=group, signal=f"s-{name}", kind="text", text=f"bad {secret}"),
        kit.completed(name, group=group, exchanges=1, reward=1.0, task=task, **fields),
    ]


def scored(group: str, secret: str, *names: str) -> GroupScored:
    rewards = {name: float(i) for i, name in enumerate(names)}
    said = kit.verdict(rewards, dict.fromkeys(names, f"as {secret}"))
    member = {"exchanges": 1, "hints": (Hint(call=0, text=f"so {secret}"),) if secret else ()}
    return kit.scored(group, rewards, member, task=f"win {secret}", verdicts=(said,))


HISTORY: list[Event] = [
    *run("a0", "g0", secret=SECRET, metadata=msgspec.json.encode({"subject": ALICE})),
    *run("a1", "g0", secret=SECRET, size=1_200_000, body={"user": ALICE}),
    *run("b0", "g1"),
    *run("b1", "g1"),
    *run("a2", "g2", secret=SECRET, body={"metadata": {"user_id": ALICE}}),
    *run("b2", "g2"),
    *run("b3", "g3"),
    *run("b4", "g3"),
    # Made of a call of Alice's run, without her name.
    kit.opened("c0", group="g4"),
    kit.exchange("c0", group="g4", copied_from="a0/0", response=msgspec.json.encode({"choices": [{"text": SECRET}]})),
    kit.completed("c0", group="g4", exchanges=1, outcome="masked"),
    scored("g1", "", "b0", "b1"),
    scored("g0", SECRET, "a0", "a1"),
    scored("g2", "", "a2", "b2"),
    scored("g3", "", "b3", "b4"),
    *(
        kit.checkpoint(step, groups=(group,), group_seqs=pack_seqs([step]), metrics={"loss": 0.5})
        for step, group in enumerate(("g1", "g0", "g2", "g3"), 1)
    ),
]


@pytest.fixture
async def config(running_store: kit.StoreProcess, nats_config: NatsConfig, tmp_path: Path) -> AsyncIterator[Config]:
    """A run with Alice's and Bob's history, whose store runs."""
    async with running_store() as config, Broker.connect(nats_config) as broker:
        await kit.publish(broker, HISTORY)
        of_run = {"original_subject": HISTORY[0].subject(), "payload": encode(HISTORY[0])}
        await broker.publish(letter(reason="unstorable", **of_run))
        await kit.until_acked(broker)
        config = msgspec.structs.replace(config, project="p")
        save(config, tmp_path / SETTINGS)
        out = str(tmp_path / "exports" / "alice")
        query = "SELECT trajectory FROM trajectories WHERE trajectory LIKE 'a%'"
        made = await anyio.to_thread.run_sync(
            dataset.main, [query, "--as", "sft", "--out", out, "--run-dir", str(tmp_path)]
        )
        assert made == 0
        yield config


def holds(file: Path, text: str) -> bool:
    """Whether a text is in a file's bytes, or in the values of a Parquet file."""
    return text.encode() in file.read_bytes() or (
        file.suffix == ".parquet" and text in str(pq.ParquetFile(file).read().to_pylist())
    )


def found_in(folder: Path, text: str) -> list[str]:
    """The files below a folder that hold a text."""
    return [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file() and holds(file, text)]


async def erase(config: Config, *args: str, subject: str = ALICE) -> tuple[int, str, str]:
    """Run the command in this process. Returns its status, its output and its errors."""
    said, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        line = ["--subject", subject, "--run-dir", config.run_dir, *args]
        status = await anyio.to_thread.run_sync(command.main, line)
    return status, said.getvalue(), errors.getvalue()


async def erase_all(config: Config, *args: str) -> str:
    """Run the command with `--yes`, which must succeed. Returns its output."""
    status, said, errors = await erase(config, "--yes", *args)
    assert (status, errors) == (0, "")
    return said


async def erase_and_die(config: Config, point: str) -> None:
    """Run the command in a process that is killed at a stop point. It takes a file of a second for one that never
    will be committed."""
    program = "from store.erasure import command, in_lake; in_lake._COMMITTED_S = 1; command.main()"
    line = [sys.executable, "-c", program, "--subject", ALICE, "--run-dir", config.run_dir, "--yes"]
    killed = await anyio.run_process(line, check=False, env=os.environ | {VARIABLE: point})
    assert killed.returncode == -9, killed.stderr


def figures(config: Config) -> list[Any]:
    with sql.connect(config) as connection:
        return [connection.execute(query).fetchall() for query in FIGURES]


async def test_nothing_of_a_person_is_left_and_all_else_is_as_before(
    config: Config, nats_server: NatsServer, broker: Broker, tmp_path: Path
) -> None:
    log, rows = nats_server.folder, dict.fromkeys(("rollout.opened", "rollout.exchange", "rollout.completed"), 4)
    rows |= {"rollout.signal": 3, "group.scored": 2, "dead.letter": 1}
    before, ends = (figures(config), [(await broker.stream_info(s)).state.last_seq for s in ("ROLLOUTS", "GROUPS")])
    planted = found_in(tmp_path / "store", SECRET)
    assert {Path(file).parts[0] for file in planted} == rows.keys()
    assert found_in(tmp_path / "exports", SECRET)
    assert found_in(log, SECRET)

    status, said, errors = await erase(config)
    assert (status, "nothing was deleted" in said) == (0, True), errors
    assert found_in(tmp_path / "store", SECRET) == planted
    assert (await erase(config, "--check"))[0] == 1

    await erase_all(config, "--by", "the data officer")
    for text in (SECRET, ALICE):
        assert found_in(tmp_path, text) == found_in(log, text) == []
    assert figures(config) == before
    assert [(await broker.stream_info(s)).state.last_seq for s in ("ROLLOUTS", "GROUPS")] == ends
    (receipt,) = (r.event for r in await broker.read(DataErased))
    assert (receipt.runs, receipt.objects, receipt.folders, receipt.by) == (4, 1, 1, "the data officer")
    assert receipt.messages == {"ROLLOUTS": 15, "GROUPS": 2, "DEAD": 1}
    assert receipt.rows == rows
    assert receipt.learned == ("m@2", "m@3", "m@4")
    assert receipt.clean == {"m": "m@1"}
    status, said, _ = await erase(config, "--check")
    assert (status, receipt.erasure in said) == (0, True)

    await kit.publish(broker, run("b9", "g1"))  # the store goes on
    await kit.until_acked(broker)
    with sql.connect(config) as connection:
        assert connection.execute("SELECT count(*) FROM trajectories WHERE trajectory = 'b9'").fetchall() == [(1,)]


KILLS = [
    ["erase.planned:1", "erase.message_deleted:1", "erase.log_done:1", "erase.file_replaced:4"],
    ["erase.message_deleted:9", "erase.file_replaced:1", "erase.lake_done:1", "erase.receipt:1"],
]
"""Each stop point, in two erasures: each kill but the last interrupts the completion of the one before it."""


def test_each_stop_point_is_killed_at() -> None:
    assert {k.partition(":")[0] for kills in KILLS for k in kills} == {
        point for point in POINTS if point.startswith("erase.")
    }


@pytest.mark.parametrize("kills", KILLS, ids=("first", "second"))
async def test_the_same_command_completes_what_kills_interrupted(
    config: Config,
    nats_server: NatsServer,
    broker: Broker,
    tmp_path: Path,
    kills: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = figures(config)
    for point in kills:
        await erase_and_die(config, point)
    monkeypatch.setattr(in_lake, "_COMMITTED_S", 1)
    await erase_all(config)
    for text in (SECRET, ALICE):
        assert found_in(tmp_path, text) == found_in(nats_server.folder, text) == []
    assert figures(config) == before
    (receipt,) = (r.event for r in await broker.read(DataErased))
    assert (receipt.runs, sum(receipt.messages.values())) == (4, 18)
    assert (await erase(config, "--check"))[0] == 0


async def test_what_is_open_or_waits_is_named_and_nothing_is_deleted(
    config: Config, broker: Broker, tmp_path: Path
) -> None:
    """The plan is listed nevertheless, and `--check` names what is in the way instead of `--yes` alone."""
    begun = run("a3", "g5", secret=SECRET, body={"user": ALICE})
    for events, why in (
        (begun[:3], "runs that are open (1: a3)"),
        (begun[3:], "runs that wait for a judge (1: a3)"),
        ([scored("g5", "", "a3", "b0")], "groups that wait for the trainer (1: g5)"),
    ):
        await kit.publish(broker, events)
        status, _, errors = await erase(config, "--yes")
        assert (status, why in errors) == (2, True), errors
        assert found_in(tmp_path / "store", SECRET)
        for options, expected in (((), 0), (("--check",), 1)):
            status, said, errors = await erase(config, *options)
            lines = said.splitlines()
            assert (status, errors) == (expected, "")
            assert lines[0].startswith("5 runs in ")
            assert why in lines[-1]
            assert "--yes" not in said
    status, said, errors = await erase(config, "--untrained")
    assert (status, "run the command with --yes" in said) == (0, True), errors
    await erase_all(config, "--untrained")
    (discarded,) = (r.event for r in await broker.read(GroupDiscarded))
    assert (discarded.group, discarded.reason) == ("g5", "history_gone")
    assert found_in(tmp_path, SECRET) == []


async def test_runs_that_are_not_finished_do_not_hold_up_those_that_are(
    config: Config, broker: Broker, nats_server: NatsServer, tmp_path: Path
) -> None:
    """Whoever keeps opening runs in a person's name holds up the erasure of these alone."""
    begun = run("z1", "g8", secret="ONGOING", body={"user": ALICE})
    await kit.publish(broker, begun[:3])
    source = run("z/3", "g6", secret="SOURCE", body={"user": ALICE})
    copy = run("z2", "g7", secret="ONGOING")
    copy[1] = msgspec.structs.replace(copy[1], copied_from="z/3/0")
    await kit.publish(broker, [*source, scored("g6", "", "z/3", "b0"), *copy])
    said = await erase_all(config, "--finished", "--untrained")
    assert "left out, as they are open or wait: 3 runs (z/3, z1, z2)" in said
    for folder in (nats_server.folder, tmp_path / "store"):
        assert found_in(folder, SECRET) == []
        assert found_in(folder, "ONGOING")
    status, said, _ = await erase(config, "--check", "--finished")
    assert status == 1
    assert "(3 left out)" in said
    assert said.splitlines()[-1].startswith("something is left: run the command again when")
    await kit.publish(broker, [*begun[3:], scored("g8", "", "z1"), scored("g7", "", "z2")])
    await erase_all(config, "--finished", "--untrained")
    for secret in ("ONGOING", "SOURCE"):
        assert found_in(nats_server.folder, secret) == found_in(tmp_path / "store", secret) == []


async def test_what_can_not_be_deleted_leaves_no_receipt(config: Config, broker: Broker, tmp_path: Path) -> None:
    kept = tmp_path / "exports" / "alice" / "train.jsonl"
    kept.unlink()
    kept.mkdir()  # can't be unlinked, whoever tries
    status, _, errors = await erase(config, "--yes")
    assert (status, "train.jsonl" in errors) == (1, True)
    assert await broker.read(DataErased) == []
    kept.rmdir()
    await erase_all(config)
    assert len(await broker.read(DataErased)) == 1
    assert found_in(tmp_path, SECRET) == []


async def test_a_file_that_the_store_commits_meanwhile_stays_part_of_its_table(config: Config) -> None:
    """It is written before it is committed. One that is never committed, as of a merge that lost, is deleted."""
    lake = open_lake(config)
    rewriter = Rewriter(lake, "p", Plan(erasure="e", digest="d", runs=["b0"]))
    table = lake.table("rollout.opened")
    rows = pa.concat_tables(kit.tables(lake, table.tag))
    added = write_rows(table.storage, table.tag, rows)
    table.storage.write(table.tag, "lost.parquet", [rows])
    lost = Path(table.storage.uri(table.tag)) / "lost.parquet"
    os.utime(lost, (0, 0))

    def commit(_: float) -> None:
        own = EventTable(lake.storage, table.tag)
        own.files()
        own.commit([added])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(in_lake.time, "sleep", commit)
        await anyio.to_thread.run_sync(rewriter.erase)
    assert not lost.exists()
    assert figures(config)
    with sql.connect(config) as connection:
        assert connection.execute("SELECT count(*) FROM rollout_opened WHERE trajectory = 'b0'").fetchall() == [(0,)]


async def test_nobody_and_somebody_unknown(config: Config, tmp_path: Path) -> None:
    planted = found_in(tmp_path / "store", SECRET)
    assert (await erase(config, subject=""))[0] == 2
    status, said, _ = await erase(config, "--yes", subject="bob")
    assert (status, "0 runs" in said) == (0, True)
    assert found_in(tmp_path / "store", SECRET) == planted
