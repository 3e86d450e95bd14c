"""A plugin of pytest: in its process, Unsloth has done to TRL what it does on a machine with a GPU.

    python -m pytest -p tests.trainer.unsloth_as_on_cuda tests/trainer/engine

Without a GPU, Unsloth is imported under `UNSLOTH_ALLOW_CPU=1`, where it leaves TRL as it is. The patch that it leaves
out is applied here by hand."""

from __future__ import annotations

import os
import tempfile
import warnings

os.environ["UNSLOTH_COMPILE_LOCATION"] = tempfile.mkdtemp(prefix="unsloth-")  # the classes that it generates
os.environ["UNSLOTH_ALLOW_CPU"] = "1"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from unsloth import FastLanguageModel
    from unsloth.models.rl import PatchFastRL

    os.environ["UNSLOTH_ALLOW_CPU"] = "0"
    PatchFastRL(FastLanguageModel=FastLanguageModel)
    import trl

assert trl.GRPOTrainer.__name__ == "UnslothGRPOTrainer", "Unsloth did not replace TRL's trainer"
