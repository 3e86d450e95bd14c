"""Fixtures: a server that knows the services' users."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from pipeline.security import users
from tests.conftest import NatsServer


@pytest.fixture
def nats_server(start_nats: Callable[..., NatsServer], tmp_path: Path) -> NatsServer:
    return start_nats(extra=users.authorization(tmp_path / "users"))


@pytest.fixture
async def nats_config(nats_server: NatsServer, tmp_path: Path) -> NatsConfig:
    """A server that knows the services' users: the command has its own rights."""
    made = NatsConfig(url=nats_server.url, users=str(tmp_path / "users"), publish_deadline_s=20)
    async with Broker.connect(made):
        return msgspec.structs.replace(made, provision=False)
