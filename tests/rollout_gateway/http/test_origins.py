"""Checks of a request's origin: host names and web pages; and the meaning of its path."""

import socket
from typing import Any

import httpx
import pytest

from pipeline.config import ConfigError, GatewayConfig, HttpConfig
from rollout_gateway.http.errors import ApiError
from rollout_gateway.http.origins import OriginPolicy
from tests.rollout_gateway.conftest import GatewayProcess, StartGateway


class Head:
    """As much of a request as OriginPolicy reads."""

    def __init__(self, method: str = "POST", **headers: str) -> None:
        self.method = method
        self.headers = {name.replace("_", "-").encode(): value.encode("latin-1") for name, value in headers.items()}


def checked(config: GatewayConfig, **head: Any) -> int:
    """The status a head is refused with, or 200."""
    request: Any = Head(**head)
    try:
        OriginPolicy(config).check(request)
    except ApiError as error:
        return error.status
    return 200


LOOPBACK = GatewayConfig()


@pytest.mark.parametrize(
    ("config", "host", "status"),
    [
        (LOOPBACK, "127.0.0.1:8700", 200),
        (LOOPBACK, "127.9.9.9", 200),
        (LOOPBACK, "LocalHost.:1", 200),
        (LOOPBACK, "[::1]:8700", 200),
        (LOOPBACK, "evil.example:8700", 421),
        (LOOPBACK, "localhost.evil.example", 421),
        (LOOPBACK, "192.168.1.5:8700", 421),
        (LOOPBACK, "", 400),
        (LOOPBACK, "localhost:8700@evil.example", 400),
        (LOOPBACK, "localhost:8700/@evil.example", 400),
        (LOOPBACK, "localhost@evil.example", 400),
        (LOOPBACK, "x@127.0.0.1", 400),
        (LOOPBACK, "127.0.0.1:18702:1", 400),
        (LOOPBACK, "localhost:evil", 400),
        (LOOPBACK, "localhost:", 400),
        (LOOPBACK, "localhost:0", 400),
        (LOOPBACK, "localhost:65536", 400),
        (LOOPBACK, "localhost:65535", 200),
        (LOOPBACK, "[::1]x", 400),
        (LOOPBACK, "[1.2:]", 400),
        (GatewayConfig(http=HttpConfig(hosts=("*",))), "a b", 400),
        (GatewayConfig(host="0.0.0.0"), "gw.example#x", 400),
        (GatewayConfig(http=HttpConfig(hosts=("gw.example",))), "GW.example:443", 200),
        (GatewayConfig(http=HttpConfig(hosts=("gw.example",))), "evil.example", 421),
        (GatewayConfig(http=HttpConfig(hosts=("*",))), "evil.example", 200),
        (GatewayConfig(public_url="https://gw.example/x"), "gw.example", 200),
        (GatewayConfig(host="0.0.0.0"), "anything", 200),
        (GatewayConfig(host="0.0.0.0", http=HttpConfig(hosts=("gateway",))), "gateway:8080", 200),
        (GatewayConfig(host="0.0.0.0", http=HttpConfig(hosts=("gateway",))), "10.0.0.7:8080", 200),
        (GatewayConfig(host="0.0.0.0", http=HttpConfig(hosts=("gateway",))), "anything", 421),
    ],
)
def test_the_name_has_to_be_ours(config: GatewayConfig, host: str, status: int) -> None:
    assert checked(config, host=host) == status


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "http://localhost:8700"}, 200),
        ({"origin": "http://evil.example", "method": "GET"}, 403),
        ({"origin": "http://evil.example", "method": "OPTIONS", "access_control_request_method": "POST"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site", "method": "GET", "sec_fetch_mode": "no-cors"}, 403),
        ({"sec_fetch_site": "cross-site", "method": "GET", "sec_fetch_mode": "navigate"}, 200),
        ({"sec_fetch_site": "same-origin"}, 200),
        ({}, 200),
    ],
)
def test_a_foreign_page_is_refused(head: dict[str, str], status: int) -> None:
    assert checked(LOOPBACK, host="localhost:8700", **head) == status


PUBLIC = "https://gw.example/jw"


@pytest.mark.parametrize(
    ("config", "head", "url"),
    [
        (LOOPBACK, {"host": "localhost:1"}, "http://localhost:1"),
        (GatewayConfig(port=8700), {}, "http://127.0.0.1:8700"),
        (LOOPBACK, {"host": "in", "x_forwarded_host": "evil.example", "forwarded": "host=evil.example"}, "http://in"),
        (GatewayConfig(public_url=PUBLIC + "/"), {"host": "in"}, PUBLIC),
    ],
)
def test_the_url_that_clients_reach(config: GatewayConfig, head: dict[str, str], url: str) -> None:
    request: Any = Head(**head)
    assert OriginPolicy(config).base_url(request) == url


@pytest.mark.parametrize("url", ["gw.example", "ftp://gw"])
def test_a_public_url_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.public_url"):
        OriginPolicy(GatewayConfig(public_url=url))


# -- at a gateway ----------------------------------------------------------------------------------------------------


def test_a_web_page_drives_nothing(start_front: StartGateway) -> None:
    """A gateway without keys on the loopback, and a page that the user of the same machine looks at."""
    gateway = start_front()
    opened = gateway.open(id="run")
    for headers in (
        {"origin": "https://evil.example", "content-type": "text/plain"},
        {"host": "evil.example", "content-type": "text/plain"},
        {"host": "evil.example", "origin": "http://evil.example"},
    ):
        for path, body in (
            ("/v1/policies/tictactoe/promote", b'{"version": "tictactoe@0"}'),
            ("/v1/trajectories/run/complete", b'{"reward": 1}'),
            ("/v1/chat/completions", b"{}"),
        ):
            reply = httpx.post(f"{gateway.url}{path}", content=body, headers=headers)
            assert reply.status_code == (421 if "host" in headers else 403), reply.text
    assert httpx.get(f"{gateway.url}/v1/trajectories/run").json()["status"] == "open"
    assert httpx.get(f"{gateway.url}/health", headers={"host": "evil.example"}).status_code == 421
    assert opened["base_url"] == f"{gateway.url}/t/run/v1"


def test_the_authority_of_a_proxys_request_line_counts_as_host(start_front: StartGateway) -> None:
    gateway = start_front()
    port = gateway.config.gateway.port
    for authority, status in (("evil.example", b"421"), (f"localhost:{port}", b"200")):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(f"GET http://{authority}/health HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert client.recv(65536)[9:12] == status


def _complete(gateway: GatewayProcess, raw: str) -> int:
    with httpx.Client() as client:
        return client.post(f"{gateway.url}/v1/trajectories/{raw}/complete", json={"reward": 1}).status_code


@pytest.mark.slow
def test_a_path_is_decoded_once(start_front: StartGateway) -> None:
    gateway = start_front()
    for name in ("victimA", "victim%41", "a/b", "100%", "ä b"):
        gateway.open(id=name, group=name)
    assert _complete(gateway, "victim%2541") == 200  # the id `victim%41`

    def status(name: str) -> str:
        path = f"/v1/trajectories/{httpx.URL('http://x', params={'q': name}).query[2:].decode().replace('+', '%20')}"
        return str(httpx.get(f"{gateway.url}{path}").json()["status"])

    assert [status(n) for n in ("victimA", "victim%41")] == ["open", "completed"]
    assert [_complete(gateway, raw) for raw in ("a%2Fb", "100%25", "%C3%A4%20b", "victim%41")] == [200] * 4
    assert [_complete(gateway, raw) for raw in ("%ff", "a/b")] == [400, 404]
    for name in (".", ".."):
        reply = httpx.post(f"{gateway.url}/v1/trajectories", json={"model": "tictactoe", "id": name})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_name")
