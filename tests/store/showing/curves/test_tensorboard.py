"""TensorBoard's event files. What they hold is tested in `test_task`."""

from __future__ import annotations

import subprocess
import sys


def test_a_store_does_not_import_torch() -> None:
    code = "import store.service, sys; print(sorted({'torch', 'tensorboardX'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['tensorboardX']"
