"""The architecture picture is that of the code."""

import runpy

from tests.test_packaging import ROOT


def test_the_picture_shows_the_rights_that_the_services_have() -> None:
    drawn = runpy.run_path(str(ROOT / "docs/pictures/architecture.py"))["draw"]()
    assert (ROOT / "docs/pictures/architecture.svg").read_text("utf-8") == drawn, (
        "run `python docs/pictures/architecture.py`"
    )
