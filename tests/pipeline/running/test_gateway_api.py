"""One request to the gateway: answers that are no JSON object, as a proxy before the gateway gives them."""

import re
from functools import partial

import httpx
import pytest

from pipeline.running.gateway_api import GatewayApi, GatewayError


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
        None,
    ],
)
def test_an_answer_that_is_no_json_object_is_an_error_with_its_status_and_none_has_the_status_0(
    monkeypatch: pytest.MonkeyPatch, answer: httpx.Response | None
) -> None:
    def respond(_: httpx.Request) -> httpx.Response:
        if answer is None:
            raise httpx.ConnectError("refused")
        return answer

    monkeypatch.setattr(httpx, "Client", partial(httpx.Client, transport=httpx.MockTransport(respond)))
    said = "does not answer (ConnectError)" if answer is None else f"answered {answer.status_code}"
    with pytest.raises(GatewayError, match=re.escape(said)) as raised:
        GatewayApi("http://gateway").ask("GET", "/v1/policies")
    assert (raised.value.status, raised.value.code) == (answer.status_code if answer is not None else 0, "")
