"""What a client with a wrong address or key is told."""

import re
from pathlib import Path

import pytest

from rollout_gateway.api.routes import ROUTES, Route, find_route
from rollout_gateway.http.errors import ApiError, invalid_key


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/models", "/trajectories"])
def test_a_base_url_without_v1_is_told_what_is_missing(path: str) -> None:
    with pytest.raises(ApiError, match=r"base URL with /v1 at its end") as refused:
        find_route("POST", path)
    assert (refused.value.status, refused.value.code) == (404, "unknown_url")


def test_another_unknown_path_is_not_and_a_wrong_method_is_told_the_right_one() -> None:
    with pytest.raises(ApiError) as refused:
        find_route("GET", "/v1/nothing")
    assert "base URL" not in str(refused.value)
    with pytest.raises(ApiError) as refused:
        find_route("PUT", "/v1/trajectories")
    assert (refused.value.status, refused.value.headers) == (405, ((b"allow", b"POST"),))


def test_a_wrong_key_is_told_where_keys_come_from() -> None:
    assert "`journeywork keys add`" in str(invalid_key())


GATEWAY_PAGE = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text("utf-8")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_every_route_is_in_gateway_md(route: Route) -> None:
    action = route.path.rpartition("/")[2]
    paths = re.findall(r"(/[\w/<>.…-]+)", GATEWAY_PAGE.replace("<action>", action))
    assert any(route.pattern.fullmatch(path.strip("/")) for path in paths), "describe it in docs/gateway.md"
