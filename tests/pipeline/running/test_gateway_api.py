"""One request to the gateway: answers that are no JSON object, as a proxy before the gateway gives them."""

from functools import partial

import httpx
import pytest

from pipeline.running.gateway_api import GatewayApi, GatewayError


def error_of(monkeypatch: pytest.MonkeyPatch, answer: httpx.Response | Exception) -> GatewayError:
    """Return the error that `ask` raises for an answer, or for an exception in its place."""

    def respond(_: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(httpx, "Client", partial(httpx.Client, transport=httpx.MockTransport(respond)))
    with pytest.raises(GatewayError) as raised:
        GatewayApi("http://gateway").ask("GET", "/v1/policies")
    return raised.value


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(502, html="<h1>Bad Gateway</h1>"),
        httpx.Response(502, content=b"\xff"),
        httpx.Response(404, json=["nothing here"]),
        httpx.Response(502, json={"error": "Bad Gateway"}),
        httpx.Response(301, headers={"location": "https://gateway"}),
        httpx.Response(200, html="<h1>Sign in</h1>"),
        httpx.Response(200, json=["policies"]),
        httpx.Response(204),
    ],
)
def test_an_answer_that_is_no_json_object_is_an_error_with_its_status(
    monkeypatch: pytest.MonkeyPatch, answer: httpx.Response
) -> None:
    error = error_of(monkeypatch, answer)
    assert (error.status, error.code) == (answer.status_code, "")
    assert f"answered {answer.status_code}" in str(error)


def test_the_status_is_0_if_there_was_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    error = error_of(monkeypatch, httpx.ConnectError("refused"))
    assert (error.status, "does not answer (ConnectError)" in str(error)) == (0, True)
