"""Versions of a lake: which there are, and their copies in a bucket."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import journeywork.art as art
from journeywork.art.local.copies import steps_in
from journeywork.forking import settings_of
from pipeline.lake_files import ADAPTER, EVENT, checkpoint_folder
from tests.store.conftest import object_store, s3_server
from trainer.checkpoints.checkpoint import pack

__all__ = ["object_store", "s3_server"]  # fixtures


def add_version(
    lake: Path,
    project: str,
    name: str,
    step: int,
    files: tuple[str, ...] = (ADAPTER, EVENT),
    *,
    branch: str = "main",
) -> None:
    folder = lake / checkpoint_folder(project, branch, name, step)
    folder.mkdir(parents=True)
    for file in files:  # the event is written last: without it, the copy is not whole
        (folder / file).write_bytes(
            pack(
                {
                    "adapter_config.json": b'{"r": 4, "lora_alpha": 8, "base_model_name_or_path": "b"}',
                    "adapter_model.safetensors": b"%d" % step,
                }
            )
            if file == ADAPTER
            else b"%d" % step
        )


@pytest.mark.parametrize("name", ["m", "qwen2.5", "Qwen/Qwen3-4B", "Größe ~x"])
def test_versions_are_found_under_every_name(name: str, tmp_path: Path) -> None:
    for step, files in ((1, (ADAPTER, EVENT)), (12, (ADAPTER, EVENT)), (13, (ADAPTER,))):
        add_version(tmp_path, "p.1", name, step, files)
    assert sorted(steps_in(str(tmp_path), "p.1", name)) == [1, 12]
    assert steps_in(str(tmp_path), "p.1", "nobody") == []


@pytest.mark.anyio
async def test_versions_go_to_a_bucket_and_another_machine_begins_with_them(
    object_store: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JOURNEYWORK_URL", raising=False)
    monkeypatch.setenv("BACKUP_BUCKET", object_store["dir"].removeprefix("s3://"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_store["s3_endpoint"])
    bucket = object_store["dir"]
    model: Any = art.TrainableModel(name="m", project="p", base_model="b", base_path=str(tmp_path / "here"))
    here, there = (
        art.LocalBackend(path=str(tmp_path / "here")),
        art.LocalBackend(path=str(tmp_path / "there")),
    )

    async def newest(_: Any) -> int:
        return 2

    monkeypatch.setattr(here, "get_step", newest)
    for step in (1, 2):
        add_version(here.run_dir(model) / "store", "p", "m", step)
    model.overwrite_state({"epoch": 3})
    await here._experimental_push_to_s3(model)
    assert sorted(steps_in(bucket, "p", "m")) == [1, 2]

    await there._experimental_pull_from_s3(model)
    pulled = there.run_dir(model).with_name("pulled")
    assert steps_in(str(pulled), "p", "m") == [2], "the newest one"
    assert (pulled.parent / "state.json").read_text() == '{"epoch": 3}'
    assert there._starts == {there.run_dir(model): f"{pulled}#p/main/m@2"}
    there.run_dir(model).mkdir(parents=True)
    (there.run_dir(model) / "config.toml").touch()
    there._starts.clear()
    await there._experimental_pull_from_s3(model)
    assert not there._starts, "its training has begun: the bucket's versions are older"

    folder = await there._experimental_pull_model_checkpoint(
        model, step=1, s3_bucket=bucket.removeprefix("s3://"), local_path=str(tmp_path / "adapter")
    )
    assert (Path(folder) / "adapter_model.safetensors").read_text() == "1"
    assert folder == str(tmp_path / "adapter")
    newest_pulled = Path(await there._experimental_pull_model_checkpoint(model))
    assert (newest_pulled / "adapter_model.safetensors").read_text() == "2"
    # `train` links a step's folder to the trainer's checkpoint, which a pull leaves as it is.
    own = here.run_dir(model).with_name("own")
    own.mkdir()
    link = here.run_dir(model).with_name("checkpoints") / "0002"
    link.parent.mkdir()
    link.symlink_to(own)
    newest_folder = Path(await here._experimental_pull_model_checkpoint(model))
    assert not list(own.iterdir())
    assert sorted(file.name for file in newest_folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert (newest_folder / "adapter_model.safetensors").read_text() == "2"
    assert settings_of(bucket)["models.0.start"] == f"{bucket}#p/main/m@2"
    with pytest.raises(LookupError, match="no version 7 of m"):
        await here._experimental_pull_model_checkpoint(model, step=7)


@pytest.mark.anyio
async def test_without_a_bucket_nothing_is_copied(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("BACKUP_BUCKET", raising=False)
    monkeypatch.setenv("JOURNEYWORK_URL", "http://gateway")
    model: Any = art.TrainableModel(name="m", project="p", base_model="b")
    backend = art.LocalBackend()
    await backend._experimental_pull_from_s3(model)
    await backend._experimental_push_to_s3(model)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    monkeypatch.setenv("BACKUP_BUCKET", "backups")
    with pytest.raises(art.UnsupportedError, match=r"set its store\.dir to s3://backups"):
        await backend._experimental_push_to_s3(model)
