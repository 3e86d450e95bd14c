"""Which versions an erasure lists: those that learned from a person's runs, and their descendants."""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import Config, ConfigError, ModelConfig
from pipeline.events import Event
from store.erasure.command import _summary
from store.erasure.plan import Plan, _version_in_own_lake, digest_of, journal_of, make_plan
from store.reading import sql
from tests.store.kit import checkpoint, exchange, fill, opened, scored, signal


def plan_of(tmp_path: Path, versions: list[Event], *, finished: bool = False) -> Plan:
    """The plan for Alice, whose only run is in the scored group g."""
    request = msgspec.json.encode({"messages": [], "user": "alice"})
    config = Config(project="p", run_dir=str(tmp_path), models=(ModelConfig(name="m", base="tiny"),))
    fill(tmp_path, exchange("a", group="g", request=request), scored("g", {"a": 1.0, "b": 0.0}), *versions)
    with sql.connect(config) as connection:
        return make_plan(connection, config, "alice", untrained=True, finished=finished)


def trained(step: int, group: str = "g", **more: Any) -> Event:
    return checkpoint(step, groups=(group,), **more)


corrected = partial(signal, group="g2", kind="correction")


def test_a_damaged_journal_of_an_erasure_is_named(tmp_path: Path) -> None:
    config = Config(project="p", run_dir=str(tmp_path))
    fill(tmp_path, exchange("a", group="g"))
    journal = journal_of(config, digest_of(config, "alice"))
    journal.parent.mkdir(parents=True, exist_ok=True)
    journal.write_bytes(b"")
    with sql.connect(config) as connection, pytest.raises(ConfigError, match=f"{journal} is damaged"):
        make_plan(connection, config, "alice", untrained=True)


def test_a_branch_s_version_that_main_adopted_and_what_came_after(tmp_path: Path) -> None:
    own = str(tmp_path)
    plan = plan_of(
        tmp_path,
        [
            trained(1, "other"),
            trained(2, branch="strict", parent="m@1", source=f"{own}#main/m@1"),
            trained(3, "other", branch="strict"),
            checkpoint(2, source=f"{own}/store#p/strict/m@3"),
            trained(3, "other"),
            checkpoint(4, source=f"{own}#m@1"),  # back to a version before: those after it did not learn from the run
            trained(5, "other"),
        ],
    )
    assert plan.learned == ["m@2", "m@3", "strict/m@2", "strict/m@3"]
    assert (plan.clean, plan.outside) == ({"m": "m@5"}, {})


def test_a_source_with_a_slash_in_its_names_is_found_in_the_lake(tmp_path: Path) -> None:
    config = Config(project="a/b", run_dir=str(tmp_path))
    for source, version in (("main/org%2Fm@3", "org/m@3"), ("a%2Fb/c%2Fd/m@2", "c/d/m@2"), ("a/main/m@2", "")):
        assert _version_in_own_lake(f"{tmp_path}#{source}", config) == version


def test_weights_from_outside_are_named(tmp_path: Path) -> None:
    source = "s3://bucket/x#main/m@6"
    plan = plan_of(tmp_path, [checkpoint(6, source=source), trained(7), checkpoint(8, branch="b", source="/adapter")])
    assert (plan.learned, plan.clean) == (["m@7"], {"m": "m@6"})
    assert plan.outside == {"m@6": source, "b/m@8": "/adapter"}
    assert f"doesn't know what m@6 learned from: it was made from {source}" in _summary(plan)


def test_no_version_before_the_first_that_learned_is_the_base(tmp_path: Path) -> None:
    """A branch began with a fresh adapter, and `main` began with its version."""
    plan = plan_of(tmp_path, [trained(4, branch="b"), checkpoint(4, source=f"{tmp_path}#b/m@4")])
    assert (plan.learned, plan.clean) == (["b/m@4", "m@4"], {"m": "m@0"})


def test_a_step_on_a_data_set_with_the_person_s_runs(tmp_path: Path) -> None:
    sources = []
    for name, run in (("hers", "a"), ("others", "b")):
        folder = tmp_path / "exports" / name
        folder.mkdir(parents=True)
        (folder / "README.md").write_text("made by journeywork dataset")
        pq.write_table(pa.table({"run": [run]}), folder / "train.parquet")
        sources.append(f"sft:sha256:{hashlib.sha256((folder / 'train.parquet').read_bytes()).hexdigest()}")
    hers, others = sources
    unknown = "sft:sha256:" + "0" * 64
    steps = [others, unknown, hers, others]
    plan = plan_of(tmp_path, [checkpoint(n, source=source) for n, source in enumerate(steps, 1)])
    assert (plan.learned, plan.clean) == (["m@3", "m@4"], {"m": "m@2"})
    assert plan.outside == {"m@2": unknown}
    assert plan.folders == [str(tmp_path / "exports" / "hers")]


@pytest.mark.parametrize("content", [b"text", b"PAR1"])
def test_a_damaged_data_set_may_hold_the_person_s_runs_and_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("made by journeywork dataset")
    (tmp_path / "train.parquet").write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{tmp_path}/train.parquet can't be read"):
        plan_of(tmp_path, [trained(1)])


def test_a_run_that_a_person_s_run_corrected_is_hers_too(tmp_path: Path) -> None:
    """Its signal, and the hint of its group, hold the answer that she got."""
    signals = [corrected("c", text="Dear Alice", copied_from="a"), corrected("d", text="Dear Bob", copied_from="b")]
    plan = plan_of(tmp_path, [*signals, scored("g2", {"d": 1.0}), trained(1, "g3")])
    assert plan.runs == ["a", "c"]
    assert plan.held_up == []


@pytest.mark.parametrize("run", ["c", "a"])
def test_a_run_that_corrected_one_that_is_not_finished_is_left_with_it(run: str, tmp_path: Path) -> None:
    """It tells that the other one is the person's."""
    fill(tmp_path, opened("c", group="g2"), corrected("c", text="Dear Alice", copied_from="a"))
    assert run in plan_of(tmp_path, [], finished=True).left
