"""The loss is TRL's own, also where Unsloth has replaced TRL's classes. `make gpu-lock-test` runs what needs it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import ConfigError
from trainer.engine.losses import CapturedGRPOTrainer
from trainer.engine.trl_source import GRPOConfig, GRPOTrainer, require_own

ROOT = Path(__file__).parents[3]

unsloth = pytest.mark.skipif(
    importlib.util.find_spec("unsloth") is None, reason="Unsloth is in the GPU lock only"
)


def foreign(self: Any, model: Any, inputs: Any) -> Any:
    raise NotImplementedError


def test_a_class_with_another_loss_is_refused() -> None:
    require_own(CapturedGRPOTrainer, GRPOConfig)
    for name in ("compute_loss", "_compute_loss", "get_gamma_weights"):
        with pytest.raises(ConfigError, match=rf"the loss is not TRL's own \({name}\)"):
            require_own(type("Replaced", (GRPOTrainer,), {name: foreign}), GRPOConfig)
    with pytest.raises(ConfigError, match="not TRL's own"):
        require_own(object, GRPOConfig)
    with pytest.raises(ConfigError, match=r"not TRL's own \(GRPOConfig\)"):
        require_own(CapturedGRPOTrainer, type("GRPOConfig", (GRPOConfig,), {}))


def _with_unsloth(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@unsloth
@pytest.mark.timeout(900)
def test_every_loss_equals_its_formula_after_unsloth_s_patches() -> None:
    plugin = ["-p", "tests.trainer.unsloth_as_on_cuda", "-p", "no:cacheprovider", "-W", "ignore", "-q"]
    assert " passed" in _with_unsloth("-m", "pytest", *plugin, "tests/trainer/engine/test_formulas.py")


@unsloth
@pytest.mark.timeout(300)
def test_the_classes_that_unsloth_puts_into_trl_are_refused() -> None:
    said = _with_unsloth(
        "-c",
        "import tests.trainer.unsloth_as_on_cuda, trl\n"
        "from pipeline.config import ConfigError\n"
        "from trainer.engine.trl_source import GRPOConfig, GRPOTrainer, require_own\n"
        "for classes in ((trl.GRPOTrainer, GRPOConfig), (GRPOTrainer, trl.GRPOConfig)):\n"
        "    try:\n"
        "        require_own(*classes)\n"
        "    except ConfigError as error:\n"
        "        print('refused:', error)\n",
    )
    assert said.count("refused: the loss is not TRL's own") == 2
