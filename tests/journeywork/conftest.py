"""The gateway that clients of this folder's tests speak to."""

from collections.abc import Iterator

import pytest

from tests.conftest import VllmServer
from tests.rollout_gateway.conftest import GatewayProcess, shared


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, inference_double: VllmServer) -> Iterator[GatewayProcess]:
    """A gateway for the tests of a module, before the double and with a log of its own (`config.nats`)."""
    with shared(tmp_path_factory.mktemp("gateway"), inference_double.url) as process:
        yield process
