"""Installations that `LocalBackend` starts."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

import journeywork.art as art
from journeywork.art.local import UpError
from journeywork.art.local import backend as local


class Backend(local.LocalBackend):
    """Starts a program of the test in place of `journeywork up`."""

    program = "import time; time.sleep(600)"

    def command(self, run_dir: Path, model: art.Model[Any]) -> list[str]:
        return [sys.executable, "-c", self.program]


def model(tmp_path: Path) -> art.TrainableModel[None]:
    return art.TrainableModel(name="m", project="p", base_model="b", base_path=str(tmp_path))


async def test_a_caller_that_is_cancelled_leaves_its_start_to_the_next(tmp_path: Path) -> None:
    backend, begun = Backend(path=str(tmp_path)), set[int]()
    for _ in range(2):
        waiting = asyncio.create_task(backend.url_of(model(tmp_path)))
        while not backend._started:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # time to start another one
        waiting.cancel()
        begun |= {process.pid for process in backend._started.values()}
    (process,) = backend._started.values()
    assert begun == {process.pid}
    await backend.close()
    assert process.poll() is not None


async def test_the_error_of_a_start_holds_what_the_program_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = Backend(path=str(tmp_path))
    backend.program = "import sys; sys.exit('x' * 3000 + '\\njourneywork: models.0.base is not on this machine')"
    with pytest.raises(
        UpError, match=r"status 1 .*standard error ends with:\nx+\n.* is not on this machine$"
    ) as caught:
        await backend.url_of(model(tmp_path))
    assert len(str(caught.value)) < 2200
    assert capfd.readouterr().err.endswith("x\njourneywork: models.0.base is not on this machine\n"), "shown too"
    await backend.close()
