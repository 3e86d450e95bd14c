"""The headers of a request, and which errors are tried again."""

import ssl

import httpx
import pytest

from journeywork import AsyncJourneywork, Journeywork, JourneyworkError
from journeywork.transport import authorization, plain_errors, transport_problem


def test_white_space_around_a_key_is_removed() -> None:
    assert authorization(" secret\r\n") == {"authorization": "Bearer secret"}
    assert authorization("") == authorization("\n") == {}
    with Journeywork("http://gateway", api_key="secret\n") as client:
        assert client._core._blocking_http.headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize("client", [Journeywork, AsyncJourneywork])
@pytest.mark.parametrize("key", ["secret\nkey", "secret\0key", "secret\u2028key", "s\u00e9cretkey"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_told(
    client: type[Journeywork] | type[AsyncJourneywork], key: str
) -> None:
    with pytest.raises(ValueError, match="the API key holds a character") as refused:
        client("http://gateway", api_key=key)
    assert "cret" not in str(refused.value)


def test_an_error_that_every_attempt_meets_is_not_tried_again() -> None:
    assert transport_problem(httpx.ReadError("reset")) == "reset"
    assert transport_problem(httpx.ConnectTimeout("")) == "ConnectTimeout"
    for error in (httpx.UnsupportedProtocol("no scheme"), httpx.LocalProtocolError("bad header")):
        with pytest.raises(JourneyworkError, match=f"cannot be sent: {error}"):
            transport_problem(error)
    plain = httpx.ConnectError("[SSL: WRONG_VERSION_NUMBER]")
    plain.__cause__ = ssl.SSLError()
    plain.__cause__.reason = "WRONG_VERSION_NUMBER"
    with pytest.raises(JourneyworkError, match=r"does not speak TLS .*: write http://"):
        transport_problem(plain)
    untrusted = httpx.ConnectError("[SSL]")
    untrusted.__cause__ = ssl.SSLCertVerificationError("self-signed")
    with pytest.raises(JourneyworkError, match="SSL_CERT_FILE"):
        transport_problem(untrusted)


def test_a_group_of_expected_errors_becomes_the_first_of_them() -> None:
    first = JourneyworkError("first")
    with pytest.raises(JourneyworkError) as found, plain_errors(JourneyworkError):
        raise ExceptionGroup("", [ExceptionGroup("", [first]), JourneyworkError("second")])
    assert found.value is first
    with pytest.raises(ExceptionGroup), plain_errors(JourneyworkError):
        raise ExceptionGroup("", [first, KeyError("a fault of the program")])
