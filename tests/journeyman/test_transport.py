"""The headers of a request."""

from __future__ import annotations

import pytest

from journeyman import AsyncJourneyman, Journeyman
from journeyman.transport import authorization


def test_white_space_around_a_key_is_removed() -> None:
    assert authorization(" secret\r\n") == {"authorization": "Bearer secret"}
    assert authorization("") == authorization("\n") == {}
    with Journeyman("http://gateway", api_key="secret\n") as client:
        assert client._http.headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize("client", [Journeyman, AsyncJourneyman])
@pytest.mark.parametrize("key", ["secret\nkey", "secret\0key", "secret\u2028key", "s\u00e9cretkey"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_told(
    client: type[Journeyman] | type[AsyncJourneyman], key: str
) -> None:
    with pytest.raises(ValueError, match="the API key holds a character") as refused:
        client("http://gateway", api_key=key)
    assert "cret" not in str(refused.value)
