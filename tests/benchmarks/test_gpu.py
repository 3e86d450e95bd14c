"""The GPU proof's command, on toy sizes and a CPU."""

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


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_batch_that_fails_costs_its_own_figures_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, trl = tmp_path / "gpu.json", {}

    def fails(engine: object, state: object, examples: list[object], *_: object) -> dict[str, float]:
        if not trl:
            trl["called"] = len(json.loads(out.read_text())["sizes"]["0.6b"]["batches"])  # what is written by then
            raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")
        return {"loss": 0.0}

    monkeypatch.setattr(gpu, "_trl", fails)
    with pytest.raises(SystemExit) as caught:
        gpu.main(["--device", "cpu", "--tiny", "--rounds", "1", "--only", "0.6b", "--out", str(out)])
    assert caught.value.code == 1
    assert trl == {"called": 1}
    part = json.loads(out.read_text())["sizes"]["0.6b"]
    assert part["batches"]["short"]["trl"] == {"failed": "CUBLAS_STATUS_EXECUTION_FAILED"}
    assert all("loss" in part["batches"][name]["journeywork"] for name in gpu.BATCHES)
    assert part["longest"]["loss"]


def test_no_batch_begins_after_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--device", "cpu", "--tiny", "--seconds", "0", "--only", "0.6b", "--out", str(tmp_path / "gpu.json")])
    assert capsys.readouterr().out == "0.6b: left out, no time\n"
    assert not (tmp_path / "gpu.json").exists()


def test_without_a_gpu_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as caught:
        gpu.main(["--out", str(tmp_path / "gpu.json")])
    assert caught.value.code == 2
    assert not (tmp_path / "gpu.json").exists()
