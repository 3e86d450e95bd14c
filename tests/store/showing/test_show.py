"""`journeywork trajectory show` and `journeywork group show`: from the store, else from the gateway."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline.events import Event, GroupScored, Hint, Member, Score, Verdict, pack_mask
from pipeline.running.runs import SETTINGS
from store.showing.show.command import main, outline
from store.showing.show.group import GROUP
from store.showing.show.trajectory import TRAJECTORY
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
    assert main(TRAJECTORY, ["show", "t0", "--run-dir", str(run)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("trajectory t0  ")
    for part in (
        "\nrun:\n  project p  model m  trajectory t0  group_id g0  task win", "outcome scored  reward 1.000",
        "\n  messages:\n  - role system  content play\n  - role user  content go 0\n"
        "  reply:\n    role assistant  content x\n",
        "judge_model judge/1", "score 0.900  explanation wins", "\ntrained_in:\n- version m@1  branch main\n",
    ):  # fmt: skip
        assert part in told, told
    assert "logprob" not in told


def test_votes_on_calls_are_shown_with_their_reasons_rewards_and_hints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (opened, *_) = run_of_one_step()
    hint = "look in the other drawer"
    votes = tuple(
        Score(trajectory="t0", score=-1.0, call=1, explanation="the user objected", hint=said)
        for said in (hint, "")
    )
    verdicts = tuple(Verdict(judge_model="judge/1", rubric="next_state", scores=(vote,)) for vote in votes)
    member = Member(trajectory="t0", reward=0.0, call_rewards={"1": -1.0}, hints=(Hint(call=1, text=hint),))
    names = {"project": "p", "model": "m", "group": "g0", "judge": "j"}
    fill(tmp_path, [opened, exchange("t0", 0), GroupScored(**names, members=(member,), verdicts=verdicts)])
    assert main(TRAJECTORY, ["show", "t0", "--run-dir", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    for part in (
        "call 1  score -1.000  explanation the user objected  hint look in",
        "call_rewards 1=-1",
        "text look in",
    ):
        assert part in told, told


def test_tokens_and_tools_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TRAJECTORY, ["show", "agent", "--tokens", "--run-dir", str(run)]) == 0
    told = capsys.readouterr().out
    assert "      name look\n" in told, "its tools"
    assert "\n  - role tool\n    content:\n      sun\n      and wind\n" in told
    assert "  status cancelled  " in told
    assert "  - id 3  text 3  logprob -0.500  forced False  trained True\n" in told
    assert "  - id 4  text 4  logprob -0.250  forced True  trained False\n" in told


def test_json_is_the_page_s_data(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TRAJECTORY, ["show", "t0", "--json", "--run-dir", str(run)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [call["seq"] for call in data["calls"]] == [0, 1]
    assert "tokens" not in data["calls"][0]
    assert main(TRAJECTORY, ["show", "t0", "--json", "--tokens", "--run-dir", str(run)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["calls"][0]["tokens"][0]["logprob"] == -0.5
    assert main(GROUP, ["show", "g0", "--json", "--run-dir", str(run)]) == 0
    assert [m["trajectory"] for m in json.loads(capsys.readouterr().out)["members"]][:2] == ["t0", "t1"]


def test_a_long_run_is_shown_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (opened, *_) = run_of_one_step()
    fill(tmp_path, [opened, *(exchange("t0", seq) for seq in range(45))])
    assert main(TRAJECTORY, ["show", "t0", "--run-dir", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert re.findall(r"  seq (\d+)  ", told) == [str(seq) for seq in range(45)]


def test_what_a_model_wrote_acts_on_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (opened, *_) = run_of_one_step()
    reply = {"role": "assistant", "content": "\x1b[2J\x9b2Jgone"}
    said = json.dumps({"choices": [{"message": reply}]}).encode()
    fill(tmp_path, [opened, exchange("t0", 0, response=said)])
    assert main(TRAJECTORY, ["show", "t0", "--run-dir", str(tmp_path)]) == 0
    assert "content \\x1b[2J\\x9b2Jgone" in capsys.readouterr().out
    assert main(TRAJECTORY, ["show", "t0", "--json", "--run-dir", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "\x9b" not in told
    assert json.loads(told)["calls"][0]["reply"]["content"] == "\x1b[2J\x9b2Jgone"


def test_what_an_agent_wrote_begins_no_line() -> None:
    data = {
        "notes": ["fine\nstatus ok"],
        "metadata": {"a\nstatus ok": 1},
        "b\nstatus ok": {"c\nstatus ok": "x\ny"},
    }
    assert list(outline(data)) == [
        "metadata a\\nstatus ok=1", "notes:", "- fine", "  status ok", "b\\nstatus ok:", "  c\\nstatus ok:", "    x",
        "    y",
    ]  # fmt: skip


def test_a_group_is_shown_side_by_side(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(GROUP, ["show", "g0", "--run-dir", str(run)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("group g0  branch main\nscored:\n- project p  model m  ")
    for part in (
        "reward_mean 0.500", "trajectory t0  reward 1.000", "judge_model judge/1", "explanation wins",
        "name label  kind number  value 1.000  text wins  given_by me",
        "reply:\n    role assistant  content x\n", "trained_in:\n- version m@1",
    ):  # fmt: skip
        assert part in told, told


def test_what_is_too_new_is_asked_of_the_gateway(
    run: Path, gateway: str, capsys: pytest.CaptureFixture[str]
) -> None:
    there = ["--run-dir", str(run), "--url", gateway]
    assert main(TRAJECTORY, ["show", "new", *there]) == 0
    told = capsys.readouterr().out
    assert "not in the store yet" in told
    assert "status open  exchanges 3\n" in told
    assert main(GROUP, ["show", "young", *there]) == 0
    assert "The gateway says:\nIt was neither scored nor discarded." in capsys.readouterr().out
    assert main(GROUP, ["show", "young", "--json", *there]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "waiting"


def test_what_is_nowhere_is_one_line(run: Path, gateway: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TRAJECTORY, ["show", "no", "--run-dir", str(run), "--url", gateway]) == 1
    assert "There is no trajectory 'no'" in (told := capsys.readouterr().err)
    assert "does not know it either: unknown here" in told
    assert main(GROUP, ["show", "no", "--run-dir", str(run)]) == 1
    assert "start it with `journeywork up`" in capsys.readouterr().err
    assert main(GROUP, ["show", "no", "--run-dir", str(run / "nowhere")]) == 2
    assert "is no run" in capsys.readouterr().err
