"""Helpers of the tests of `journeywork.art`: a small installation before an inference server that runs already."""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.kits.installation import ROOT, Up, started

BASE = ROOT / "examples" / "tictactoe" / "model"
MODEL = "tictactoe"
SETTINGS = {
    "models.0.name": MODEL,
    "models.0.base": str(BASE),
    "vllm.max_model_len": 256,
    "trainer.lora.rank": 8,
    # Of one group a step: a test that trains several groups in one step shows that the batch was requested.
    "trainer.groups_per_step": 1,
    "trainer.logprob_bound": 1000,  # the double's logprobs are no model's
    "ui.enabled": False,
}


def installation(run_dir: Path, vllm_url: str, **settings: Any) -> AbstractContextManager[Up]:
    """Run `journeywork up` in a process of its own, before an inference server at `vllm_url`."""
    values = [f"{name}={json.dumps(value)}" for name, value in (SETTINGS | settings).items()]
    flags = ("--run-dir", str(run_dir), "--vllm-url", vllm_url)
    return started(run_dir.parent, run_dir, *flags, settings=values, seconds=240)
