"""The GPU proof's command, on toy sizes and a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_size_is_measured_against_trl(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    gpu.main(["--device", "cpu", "--tiny", "--rounds", "1", "--only", "0.6b", "--out", str(out)])
    part = json.loads(out.read_text())["sizes"]["0.6b"]
    assert part["logprob_difference"] < 1e-3
    for name in gpu.BATCHES:
        ours, theirs = part["batches"][name]["journeywork"], part["batches"][name]["trl"]
        assert ours["model_tflops"] > 0
        # Both took the same step from the same weights: the losses are of a few hundred tokens in float32.
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-4)


def test_without_a_gpu_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as caught:
        gpu.main(["--out", str(tmp_path / "gpu.json")])
    assert caught.value.code == 2
    assert not (tmp_path / "gpu.json").exists()
