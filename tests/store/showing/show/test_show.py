"""`journeywork trajectory show` and `journeywork group show`: from the store, else from the gateway."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline.events import Event, pack_mask
from pipeline.running.runs import SETTINGS
from store.showing.show.group import main as group
from store.showing.show.trajectory import main as trajectory
from tests.store.kit import exchange, fill, run_of_one_step

WEATHER = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}],
}


def agent_run() -> list[Event]:
    """A run of two calls with a tool, the second of which was cancelled."""
    first = {
        "messages": [{"role": "user", "content": "weather?"}],
        "tools": [{"type": "function", "function": {"name": "look"}}],
    }
    second = {"messages": [*first["messages"], WEATHER, {"role": "tool", "content": "sun\nand wind"}]}
    answer = {"role": "assistant", "content": "sunny"}
    calls = ((first, WEATHER, {}), (second, answer, {"status": "cancelled", "forced": pack_mask([0, 1])}))
    return [
        exchange(
            "agent", seq, request=json.dumps(request).encode(),
            response=json.dumps({"choices": [{"message": reply}]}).encode(), **more,
        )
        for seq, (request, reply, more) in enumerate(calls)
    ]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    opened = [e.__class__(**{**_fields(e), "trajectory": "agent"}) for e in run_of_one_step()[:1]]
    fill(tmp_path, [*run_of_one_step(), *opened, *agent_run()])
    (tmp_path / SETTINGS).write_text('project = "p"\n\n[[models]]\nname = "m"\nbase = "base"\n')
    return tmp_path


def _fields(event: Event) -> dict[str, object]:
    return {name: getattr(event, name) for name in event.__struct_fields__}


@pytest.fixture
def gateway() -> Iterator[str]:
    """URL of a gateway that knows the run `new` and the group `young`."""
    known = {
        "/v1/trajectories/new": {"id": "new", "status": "open", "exchanges": 3},
        "/v1/groups/young": {"group": "young", "status": "waiting"},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = known.get(self.path)
            body = json.dumps(found or {"error": {"message": "unknown here"}}).encode()
            self.send_response(200 if found else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_run_is_shown_with_its_messages_and_verdicts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trajectory(["show", "t0", "--run-dir", str(run)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("trajectory t0\nmodel m  group g0")
    for part in (
        "outcome scored  reward 1.000  calls 2", "task win", "call 0  by m@0  prompt tokens 3  sampled tokens 2",
        "  system:\n    play\n  user:\n    go 0\n  assistant:\n    x\n",
        "  (1 earlier message)\n  user:\n    go 1\n",
        "verdicts\n  reward 1.000  branch main", "judge/1 (general) 0.900: wins", "trained in m@1",
    ):  # fmt: skip
        assert part in told, told
    assert "-0.5000" not in told


def test_tokens_and_tools_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trajectory(["show", "agent", "--tokens", "--run-dir", str(run)]) == 0
    told = capsys.readouterr().out
    assert "  tools look\n" in told
    assert "calls [" in told
    assert "  (2 earlier messages)\n  tool:\n    sun\n    and wind\n  assistant:\n    sunny\n" in told
    assert "call 1  by m@0  status cancelled" in told
    lines = [line.split() for line in told.splitlines() if line.strip().startswith(("3 ", "4 "))]
    assert lines == [["3", "'3'", "-0.5000"], ["4", "'4'", "-0.2500"], ["3", "'3'", "-0.5000", "not", "trained"],
                     ["4", "'4'", "-0.2500", "forced"]]  # fmt: skip


def test_json_is_the_page_s_data(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trajectory(["show", "t0", "--json", "--run-dir", str(run)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [call["seq"] for call in data["calls"]] == [0, 1]
    assert "tokens" not in data["calls"][0]
    assert trajectory(["show", "t0", "--json", "--tokens", "--run-dir", str(run)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["calls"][0]["tokens"][0]["logprob"] == -0.5
    assert group(["show", "g0", "--json", "--run-dir", str(run)]) == 0
    assert [m["trajectory"] for m in json.loads(capsys.readouterr().out)["members"]][:2] == ["t0", "t1"]


def test_a_long_run_is_shown_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (opened, *_) = run_of_one_step()
    fill(tmp_path, [opened, *(exchange("t0", seq) for seq in range(45))])
    assert trajectory(["show", "t0", "--run-dir", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert [line.split()[1] for line in told.splitlines() if line.startswith("call ")] == [
        *map(str, range(45))
    ]


def test_what_a_model_wrote_acts_on_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (opened, *_) = run_of_one_step()
    reply = {"role": "assistant", "content": "\x1b[2Jgone"}
    said = json.dumps({"choices": [{"message": reply}]}).encode()
    fill(tmp_path, [opened, exchange("t0", 0, response=said)])
    assert trajectory(["show", "t0", "--run-dir", str(tmp_path)]) == 0
    assert "    \\x1b[2Jgone" in capsys.readouterr().out


def test_a_group_is_shown_side_by_side(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert group(["show", "g0", "--run-dir", str(run)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("group g0  branch main\nstatus scored  model m  split train  mean reward 0.500")
    for part in (
        "trained in m@1", "1. t0\n   reward 1.000  outcome scored  calls 2", "judge judge/1 (general) 0.900: wins",
        "person me 1.000: wins", "last reply:\n     x", "2. t1\n   reward 0.000",
    ):  # fmt: skip
        assert part in told, told


def test_what_is_too_new_is_asked_of_the_gateway(
    run: Path, gateway: str, capsys: pytest.CaptureFixture[str]
) -> None:
    there = ["--run-dir", str(run), "--url", gateway]
    assert trajectory(["show", "new", *there]) == 0
    told = capsys.readouterr().out
    assert "not in the store yet" in told
    assert "  status: open\n  exchanges: 3\n" in told
    assert group(["show", "young", *there]) == 0
    assert "  status: waiting\nIt was neither scored nor discarded." in capsys.readouterr().out
    assert group(["show", "young", "--json", *there]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "waiting"


def test_what_is_nowhere_is_one_line(run: Path, gateway: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert trajectory(["show", "no", "--run-dir", str(run), "--url", gateway]) == 1
    assert "There is no trajectory 'no'" in (told := capsys.readouterr().err)
    assert "does not know it either: unknown here" in told
    assert group(["show", "no", "--run-dir", str(run)]) == 1
    assert "start it with `journeywork up`" in capsys.readouterr().err
    assert group(["show", "no", "--run-dir", str(run / "nowhere")]) == 2
    assert "is no run" in capsys.readouterr().err
