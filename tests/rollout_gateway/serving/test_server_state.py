"""What an inference server says about itself."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

from rollout_gateway.serving import server_state

CARDS = {"data": [{"id": "base"}, {"id": "m@1", "root": "/a", "parent": "base"}]}
"""What a server says that serves its base model as `base`, and one adapter."""


@pytest.mark.parametrize(("names", "missing"), [(["base"], []), (["base", "m@0", "m@1"], ["m@0", "m@1"])])
async def test_a_base_model_that_has_not_the_name_of_its_calls_is_an_error(
    names: list[str], missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    server: Any = SimpleNamespace(fetch=AsyncMock(return_value=(200, msgspec.json.encode(CARDS))))
    monkeypatch.setattr(server_state.logger, "error", lambda event, **fields: told.append(fields))
    await server_state.check_base_names(server, "here:1", names)
    assert [fields["missing"] for fields in told] == ([missing] if missing else [])
