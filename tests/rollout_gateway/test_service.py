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


IPV6 = pytest.param("::1", r"\[::1\]", marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6"))


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", r"127\.0\.0\.1"), IPV6])
def test_a_port_on_which_another_program_listens_is_an_error_of_the_settings(host: str, shown: str) -> None:
    with closing(service._listen(host, 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"can't listen on {shown}:{port}: Address already in use"):
            service._listen(host, port)
