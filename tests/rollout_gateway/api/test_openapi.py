"""A fuzzer compares the gateway with its OpenAPI document. `openapi_fuzz` runs longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollout_gateway.conftest import StartGateway
from tests.rollout_gateway.openapi_fuzz import fuzz


@pytest.mark.vllm
@pytest.mark.timeout(600)  # the first use of other people's programs installs them
def test_the_document_is_what_holds(start_gateway: StartGateway, tmp_path: Path) -> None:
    gateway = start_gateway(max_loras=3)
    sent, _ = fuzz(gateway.url, 50, tmp_path, seed=1)
    assert sent >= 300
    assert "Traceback" not in gateway.log
