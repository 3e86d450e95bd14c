"""Adapters on the disk: verified content, safe in shared folders, readable by the owner only."""

import gzip
import hashlib
import tarfile
from pathlib import Path

import pytest

from pipeline.log.broker import Broker
from pipeline.streams import ADAPTERS_BUCKET
from rollout_gateway.sampler.adapter_files import AdapterError, AdapterFiles
from trainer.checkpoints.checkpoint import pack

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights" * 1000}


async def test_an_adapter_whose_folder_was_changed_is_unpacked_again(broker: Broker, tmp_path: Path) -> None:
    tar = pack(FILES)
    digest = hashlib.sha256(tar).hexdigest()
    names = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    await broker.put_object(ADAPTERS_BUCKET, digest, tar)
    files = AdapterFiles(tmp_path, broker)

    async def unpacked() -> dict[str, bytes]:
        folder = await files.ensure("m@1", digest, digest, names)
        assert not [f for f in folder.iterdir() if f.stat().st_mode & 0o077]
        return {f.name: f.read_bytes() for f in folder.iterdir()}

    assert await unpacked() == FILES
    (folder,) = tmp_path.iterdir()
    before = folder.stat().st_ino
    assert await unpacked() == FILES
    assert folder.stat().st_ino == before  # nothing was done again
    (folder / "adapter_model.safetensors").write_bytes(b"other weights")
    assert await unpacked() == FILES
    (folder / "added.py").write_bytes(b"import os")
    assert await unpacked() == FILES
    (folder / "adapter_config.json").unlink()
    assert await unpacked() == FILES
    with pytest.raises(AdapterError, match="SHA-256"):
        await files.ensure("m@2", digest, "0" * 64, names)


async def test_a_compressed_archive_is_not_unpacked(broker: Broker, tmp_path: Path) -> None:
    archive = gzip.compress(pack(FILES))
    digest = hashlib.sha256(archive).hexdigest()
    await broker.put_object(ADAPTERS_BUCKET, digest, archive)
    with pytest.raises(tarfile.ReadError):
        await AdapterFiles(tmp_path, broker).ensure("m@1", digest, digest, {})


async def test_only_adapters_that_no_server_may_have_loaded_are_deleted(broker: Broker, tmp_path: Path) -> None:
    digest = "0123456789abcdef" * 4
    earlier = AdapterFiles(tmp_path, broker)
    left = [earlier.path(f"m@{step}", digest) for step in (1, 2)]
    left += [left[0].with_name("m@3-0123456789abcdef.part"), tmp_path / "unused-x.deleted"]
    for folder in [*left, tmp_path / "of-the-user"]:
        folder.mkdir()
        (folder / "file").write_bytes(b"content")
    files = AdapterFiles(tmp_path, broker)
    unused, used = (files.path(f"a/b@{step}", digest) for step in (4, 5))
    for folder in (unused, used):
        folder.mkdir()

    def names() -> set[str]:
        return {path.name for path in tmp_path.iterdir()}

    before = names()
    await files.delete_unused([str(used), str(left[1])], inherited=False)
    assert names() == before - {unused.name}
    await files.delete_unused([str(used), str(left[1])], inherited=True)
    assert names() == {used.name, left[1].name, "of-the-user"}
    await AdapterFiles(tmp_path / "missing", broker).delete_unused([], inherited=True)
