"""The versions of a lake that another model can be forked from."""

from __future__ import annotations

from pathlib import Path

import pytest

from journeywork.art.local import backend
from pipeline.lake_files import ADAPTER, EVENT, checkpoint_folder


@pytest.mark.parametrize("name", ["m", "qwen2.5", "Qwen/Qwen3-4B", "Größe ~x"])
def test_versions_are_found_under_every_name(name: str, tmp_path: Path) -> None:
    for step, files in ((1, [ADAPTER, EVENT]), (12, [ADAPTER, EVENT]), (13, [ADAPTER])):
        folder = tmp_path / checkpoint_folder("p.1", "main", name, step)
        folder.mkdir(parents=True)
        for file in files:  # the event is written last: without it, the copy is not whole
            (folder / file).touch()
    assert sorted(backend._forkable_steps(str(tmp_path), "p.1", name)) == [1, 12]
    assert backend._forkable_steps(str(tmp_path), "p.1", "nobody") == []
