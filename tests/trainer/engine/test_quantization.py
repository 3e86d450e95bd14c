"""Base models in four and eight bits, by the packages that do it on a GPU: both compute on a CPU too."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.kits.environments import ROOT, packages
from trainer.engine.engine import Engine


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quantised_base_trains_as_the_weights_that_it_stands_for(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(packages("quantizers"))))}
    command = [sys.executable, "-m", "tests.trainer.engine.quantized_child", str(tmp_path)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    for kind, figures in json.loads(done.stdout.splitlines()[-1]).items():
        # Float32 sums of the same terms in another order, and a quantised base is another model than the whole one.
        assert figures["off"] < 1e-4 < figures["changed"], kind
        # Of float32's bytes, a scale for each row of 32 or 64 weights, or for each block of 64, among them.
        assert figures["share"] < {"fp8": 0.30, "4bit": 0.15}[kind]
        assert figures["losses"][-1] < figures["losses"][0]
        assert figures["same_size"]
        assert figures["resumed"] < 1e-6, kind


def test_the_scales_of_four_bit_weights_move_with_them(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stayed on the GPU while vLLM had its turn there."""
    moved: list[torch.device] = []
    weight = next(p for p in engine.model.peft.parameters() if not p.requires_grad)
    monkeypatch.setattr(weight, "quant_state", SimpleNamespace(to=moved.append), raising=False)
    engine.model.move_base(torch.device("cpu"))
    assert moved == [torch.device("cpu")]
