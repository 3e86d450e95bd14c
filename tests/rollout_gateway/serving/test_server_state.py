"""What an inference server says about itself."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from rollout_gateway.http.upstream import Upstream
from rollout_gateway.serving import server_state

pytestmark = pytest.mark.anyio


class Server:
    """An inference server that serves its base model as `base` and one adapter."""

    async def fetch(self, method: str, path: str) -> tuple[int, bytes]:
        assert (method, path) == ("GET", "/v1/models")
        cards = [{"id": "base"}, {"id": "m@1", "root": "/a", "parent": "base"}]
        return 200, msgspec.json.encode({"data": cards})


@pytest.mark.parametrize(("names", "missing"), [(["base"], []), (["base", "m@0", "m@1"], ["m@0", "m@1"])])
async def test_a_base_model_that_has_not_the_name_of_its_calls_is_an_error(
    names: list[str], missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(server_state.log, "error", lambda event, **fields: told.append(fields))
    await server_state.check_base_names(cast(Upstream, Server()), "here:1", names)
    assert [fields["missing"] for fields in told] == ([missing] if missing else [])
