"""The program that reports results late: what happens to them while the gateway can't take them."""

import io
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from examples.common.late_results import report


class _Gateway(BaseHTTPRequestHandler):
    """Hangs up on the first result of a game `cut`, is overloaded at the first of `busy`, and never takes `unknown`."""

    tries: Counter[str]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = body["answer"]
        if "text" in body:  # words come before the result, at which a run is scored
            assert (body["text"], body["key"]) == ("No.", f"words/{answer}")
            assert not self.tries[answer]
            answer = f"words on {answer}"
        else:
            assert (body["about"], body["key"]) == ("run", f"result/{answer}")
        self.tries[answer] += 1
        first = self.tries[answer] == 1
        if answer == "cut" and first:
            self.close_connection = True
            return
        status = 404 if answer == "unknown" else 503 if answer == "busy" and first else 200
        self.send_response(status)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


async def test_a_result_that_the_gateway_can_not_take_now_is_sent_again_and_the_others_are_not_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = ["cut", "busy", "unknown", "fine"]
    games = [{"answer": answer, "result": 1.0, "ended": 0.0} for answer in answers]
    games[-1]["words"] = "No."
    lines = [json.dumps(game) for game in games]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    handler = type("Handler", (_Gateway,), {"tries": Counter()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            counts = await report(f"http://127.0.0.1:{server.server_port}", 0.0)
        finally:
            server.shutdown()
    assert counts == {"taken": 3, "refused": 1}
    tries = {"cut": 2, "busy": 2, "unknown": 1, "fine": 1, "words on fine": 1}
    assert handler.tries == tries  # type: ignore[attr-defined]
    assert capsys.readouterr().err.count("refused") == 1
