"""The gateway's listening socket."""

import socket
from contextlib import closing

import pytest

from pipeline.config import ConfigError
from rollout_gateway import service


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_another_program_that_listens_first_is_an_error_of_the_settings() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: Address already in use"):
            service._listen("127.0.0.1", port)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_an_ipv6_address_stands_in_brackets() -> None:
    with closing(service._listen("::1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"can't listen on \[::1\]:{port}: Address already in use"):
            service._listen("::1", port)
