"""Checkpoints on disk are complete or absent."""

import gzip
import io
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from pipeline.events import Member
from tests.trainer import kit
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import CheckpointError, Checkpoints, Manifest, batch_id, pack, unpack
from trainer.checkpoints.validation import Validation


def manifest(step: int, files: dict[str, bytes]) -> Manifest:
    return Manifest(event=kit.checkpoint_event(step, files), config={"lora_rank": 4})


FILES = {"adapter_model.safetensors": b"weights", "state.pt": b"state"}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    made = Checkpoints(tmp_path / "m")
    made.prepare_folder()
    return made


def test_an_incomplete_checkpoint_is_not_listed(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.write(manifest(1, FILES), FILES)
    original = checkpoint.write_whole

    def dies(path: Path, content: bytes, *, durable: bool) -> None:
        original(path, content, durable=durable)
        if path.name == "state.pt":
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_whole", dies)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.write(manifest(2, FILES), FILES)
    assert checkpoints.steps() == [1]
    checkpoints.prepare_folder()
    assert [p.name for p in checkpoints.folder.iterdir()] == ["step-00000001"]


def test_a_damaged_checkpoint_is_not_read(checkpoints: Checkpoints) -> None:
    for step in (1, 2):
        checkpoints.write(manifest(step, FILES), FILES)
    (checkpoints.path(2) / "state.pt").write_bytes(b"bit rot")
    with pytest.raises(CheckpointError, match="does not match its SHA-256"):
        checkpoints.read(2)
    assert checkpoints.read(1)[0].event.step == 1


def test_attempts_that_a_power_cut_emptied_are_counted_anew(checkpoints: Checkpoints) -> None:
    assert [checkpoints.count_attempt("batch") for _ in range(2)] == [1, 2]
    (checkpoints.folder / checkpoint.ATTEMPTS_FILE).write_bytes(b"")
    assert checkpoints.count_attempt("batch") == 1


def test_pruning_keeps_the_newest_and_the_best(checkpoints: Checkpoints) -> None:
    for step in range(1, 7):
        checkpoints.write(manifest(step, FILES), FILES)
    checkpoints.prune(2, frozenset({3}))
    assert checkpoints.steps() == [3, 5, 6]
    checkpoints.prune(0)
    assert checkpoints.steps() == [6]


@pytest.mark.parametrize("deletes", ["prune", "write"])
def test_a_crash_while_a_checkpoint_is_deleted_leaves_no_part_of_it(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, deletes: str
) -> None:
    for step in (1, 2):
        checkpoints.write(manifest(step, FILES), FILES)
    original = shutil.rmtree

    def dies(path: Path, **options: bool) -> None:
        if path.is_dir() and any(path.iterdir()):
            (path / "state.pt").unlink()
            raise KeyboardInterrupt
        original(path, **options)

    with monkeypatch.context() as crashing:
        crashing.setattr(shutil, "rmtree", dies)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.prune(1) if deletes == "prune" else checkpoints.write(manifest(1, FILES), FILES)
    assert checkpoints.steps() == ([2] if deletes == "prune" else [1, 2])
    for step in checkpoints.steps():
        assert checkpoints.read(step)[1] == FILES
    checkpoints.prepare_folder()
    assert sorted(checkpoints.folder.iterdir()) == [checkpoints.path(step) for step in checkpoints.steps()]


def test_an_adapters_tar_is_the_same_for_the_same_files_and_one_with_anything_else_is_refused() -> None:
    """A compressed one too: it may be small and need more memory than there is."""
    assert pack(FILES) == pack(dict(reversed(FILES.items())))
    assert unpack(pack(FILES)) == FILES
    linked = io.BytesIO()
    with tarfile.open(fileobj=linked, mode="w") as tar:
        link = tarfile.TarInfo("adapter_model.safetensors")
        link.type, link.linkname = tarfile.SYMTYPE, "/elsewhere"
        tar.addfile(link)
    for archive in (pack({"../evil": b""}), linked.getvalue()):
        with pytest.raises(CheckpointError, match="no plain file"):
            unpack(archive)
    compressed = gzip.compress(pack(FILES))
    for archive in (pack({"a": b"1" * 2000})[:600], compressed, compressed[: len(compressed) // 2]):
        with pytest.raises(CheckpointError, match="can't be read"):
            unpack(archive)


def test_the_batch_id_depends_on_parent_groups_and_config() -> None:
    inputs = [
        ("m@1", ("g1", "g2"), "c"),
        ("m@2", ("g1", "g2"), "c"),
        ("m@1", ("g2", "g1"), "c"),
        ("m@1", ("g1", "g2"), "d"),
        ("m@1", ("g1",), "c"),
    ]
    assert len({batch_id(*given) for given in inputs * 2}) == len(inputs)


def played(validation: Validation, step: int, rewards: list[float]) -> Any:
    """Record validation runs of a step. Returns the best checkpoint after them."""
    members = tuple(
        Member(trajectory=f"{step}-{i}", reward=r, exchanges=1, split="val", first_step=step, last_step=step)
        for i, r in enumerate(rewards)
    )
    validation.record([kit.group(f"v{step}", [], members=members)])
    return validation.best


def test_two_equal_rewards_do_not_prove_a_step_better() -> None:
    """The fault that was: two standard errors of equal rewards are 0, so 0.2 beat 0 by any chance."""
    validation = Validation(None, 2)
    assert played(validation, 1, [0.0, 0.0]) == played(validation, 2, [1.0, 1.0])
    assert played(validation, 3, [1.0] * 20).step == 1  # two rewards of step 1 say too little about it
    assert played(validation, 1, [0.0] * 18).step == 1
    assert played(validation, 4, [1.0] * 20).step == 4


def test_one_validation_reward_does_not_replace_a_best_mean_of_a_hundred() -> None:
    validation = Validation(None, 8)
    assert played(validation, 1, [1.0] * 7) is None  # fewer than best_min_trajectories
    hundred = played(validation, 2, [0.0, 1.0, 1.0, 1.0] * 25)
    assert (hundred.step, hundred.rewards.mean, hundred.rewards.count) == (2, pytest.approx(0.75), 100)
    assert played(validation, 3, [1.0]) == hundred
    assert played(validation, 4, [0.0, *[1.0] * 7]) == hundred  # 0.875 over 8: within chance
    assert played(validation, 5, [0.0, *[1.0] * 99]).step == 5
