"""Files that appear whole or not at all."""

from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.files import read_json, write_once, write_whole


@pytest.mark.parametrize("durable", [False, True])
def test_content_takes_the_place_of_the_old(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "folder" / "file"
    write_whole(path, "old", durable=durable)
    write_whole(path, b"new", durable=durable, mode=0o600)
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("content", [b"", b'{"a', b"[]", b'{"a": "x"}', b"\xff"])
def test_a_damaged_file_is_an_error_with_its_name_and_what_to_do(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"file\.json is damaged \(.*\): delete it$"):
        read_json(path, dict[str, int], "delete it")


def test_after_an_error_the_old_content_is_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_whole(path, "old")

    def fail(_: Path) -> None:
        raise OSError("no space")

    monkeypatch.setattr("pipeline.files.sync", fail)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, "half of", durable=True)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_durable_content_is_synced_before_it_has_its_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    path = tmp_path / "file"
    monkeypatch.setattr("pipeline.files.sync", lambda p: synced.append((p.name, path.exists())))
    write_whole(path, "x", durable=True)
    ((first, before), (second, after)) = synced
    assert first.startswith(".tmp-file-")
    assert (before, second, after) == (False, tmp_path.name, True)


def test_a_durable_file_in_new_folders_stays_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("pipeline.files.sync", synced.append)
    write_whole(tmp_path / "a" / "b" / "file", "x", durable=True)
    assert [p for p in synced if p.is_dir()] == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    synced.clear()
    write_once(tmp_path / "c" / "d" / "key", lambda: b"secret")
    assert [p for p in synced if p.is_dir()] == [tmp_path, tmp_path / "c", tmp_path / "c" / "d"]
    assert (tmp_path / "c" / "d").stat().st_mode & 0o777 == 0o700


def test_a_secret_that_another_process_has_just_written_is_on_the_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one may not have synced the folder yet."""
    path = tmp_path / "key"
    path.write_bytes(b"secret")
    synced: list[Path] = []
    monkeypatch.setattr("pipeline.files.sync", synced.append)
    write_once(path, lambda: b"another")
    assert (path.read_bytes(), synced) == (b"secret", [tmp_path])
