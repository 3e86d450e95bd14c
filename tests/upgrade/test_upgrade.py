"""The present code opens the runs that earlier releases recorded: history, replay, and training on."""

import json
import lzma
import tarfile
from pathlib import Path

import pytest

from tests.kits.installation import JOURNEYWORK, ROOT, program, run_groups, up
from tests.upgrade.record import FOLDER, GROUPS, HISTORY, SETTINGS, TABLES

RECORDED = sorted(FOLDER.glob("*.tar.xz"))


def test_a_recording_is_small_and_of_no_machine() -> None:
    assert RECORDED
    for file in RECORDED:
        assert file.stat().st_size < 200_000
        with lzma.open(file) as content:
            assert b"/examples/tictactoe" not in content.read()  # the base's path is relative to the checkout


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.name.removesuffix(".tar.xz"))
def test_a_run_of_an_earlier_release_goes_on(file: Path, tmp_path: Path) -> None:
    with lzma.open(file) as content, tarfile.open(fileobj=content) as archive:
        archive.extractall(tmp_path, filter="data")
    run_dir = tmp_path / "new" / "run"
    program([*JOURNEYWORK, "restore", str(tmp_path / "backup"), "--run-dir", str(run_dir)], ROOT)
    recorded = json.loads((tmp_path / "history.json").read_text())
    with up(tmp_path, run_dir, "--run-dir", str(run_dir), settings=SETTINGS) as run:
        for table in TABLES:  # the lake
            assert run.query(HISTORY.format(table)) == recorded[table], table
        run.until_step(1)  # checkpoint and adapter
        # The groups that it judged make a branch, which trains from its beginning on the log.
        program([*JOURNEYWORK, "replay", "--run-dir", str(run_dir), "--branch", "again"], ROOT)
        run.until(
            lambda: (
                run.query("SELECT count(*) AS groups FROM group_scored WHERE branch = 'again'") == [{"groups": GROUPS}]
            )
        )
        run_groups(run.url, "after", GROUPS, [])
        run.until_step(2)
    assert run.process.returncode == 0
    steps = run.query("SELECT step, parent FROM policy_checkpoint WHERE branch = 'main' ORDER BY step")
    assert steps == [{"step": 1, "parent": "tictactoe@0"}, {"step": 2, "parent": "tictactoe@1"}]
