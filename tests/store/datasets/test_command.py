"""`journeywork dataset`: its rows, its files, and that TRL's trainers take them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from pipeline.events import Event
from store.datasets import command, folder
from tests.store.kit import checkpoint, completed, exchange, fill, opened, scored

ROOT = Path(__file__).parents[3]
BASE = ROOT / "examples" / "tictactoe" / "model"
ALL = "SELECT trajectory FROM trajectories"
SHARE = ("--test-share", "0.3")
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
CALLED = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "b2"}'}}]
FREE = {"role": "tool", "tool_call_id": "c1", "content": "free"}

Said = list[dict[str, Any]]


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def run(name: str, group: str, messages: Said, reward: float, tools: Any = None, examples: int = 0) -> list[Event]:
    """A run whose calls are the replies of a conversation, but for the messages of its beginning that are examples."""
    events: list[Event] = [opened(name, group=group, task=group)]
    places = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= examples]
    for seq, place in enumerate(places):
        request = {"messages": messages[:place], **({"tools": tools} if tools else {})}
        bodies = {"request": request, "response": {"choices": [{"message": messages[place]}]}}
        events.append(exchange(name, seq, group=group, **{k: msgspec.json.encode(v) for k, v in bodies.items()}))
    return [*events, completed(name, group=group, exchanges=len(places), reward=reward)]


GAMES = {
    "a1": ("one", [user("go"), reply("a1"), user("more"), reply("b1")], 1.0),
    "a2": ("one", [user("go"), reply("a1"), user("more"), reply("c1")], 0.0),
    "a3": ("one", [user("go"), reply("x9")], 0.5),
    "b1": ("two", [user([{"type": "text", "text": "look"}]), reply("", tool_calls=CALLED), FREE, reply("b2")], 1.0),
    "b2": ("two", [user("look"), reply("b3")], 0.0),
    "c1": ("three", [user([{"type": "image_url", "image_url": {"url": "data:,"}}]), reply("a dog")], 1.0),
}


def history() -> list[Event]:
    events = [
        e
        for name, (group, said, reward) in GAMES.items()
        for e in run(name, group, said, reward, TOOLS if group == "two" else None)
    ]
    return [*events, checkpoint(1, base_model="org/base"), scored("one", {"a3": 0.75})]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    fill(folder, *history())
    return folder


def dataset(run_dir: Path, out: Path, kind: str, *arguments: str, query: str = ALL) -> list[dict[str, Any]]:
    """The rows of a data set."""
    assert command.main([query, "--as", kind, "--out", str(out), "--run-dir", str(run_dir), *arguments]) == 0
    lines = [line for file in sorted(out.glob("*.jsonl")) for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def test_sft_has_each_conversation_and_its_tools(run_dir: Path, tmp_path: Path) -> None:
    rows = {row["run"]: row for row in dataset(run_dir, tmp_path / "out", "sft")}
    assert sorted(rows) == ["a1", "a2", "a3", "b1", "b2"]
    assert rows["a1"]["messages"] == GAMES["a1"][1]
    assert (rows["a1"]["tools"], json.loads(rows["b1"]["tools"])) == ("[]", TOOLS)
    assert rows["b1"]["messages"] == [user("look"), reply("", tool_calls=CALLED), FREE, reply("b2")]
    assert "- 1 × a conversation with images, audio or files" in (tmp_path / "out" / "README.md").read_text()


def test_pairs_have_the_first_reply_in_which_runs_of_a_group_part_or_the_whole(run_dir: Path, tmp_path: Path) -> None:
    rows = dataset(run_dir, tmp_path / "out", "dpo")
    assert [(r["prompt"], r["chosen"], r["rejected"]) for r in rows] == [
        ([user("go"), reply("a1"), user("more")], [reply("b1")], [reply("c1")]),
        ([user("look")], [reply("", tool_calls=CALLED)], [reply("b3")]),
    ]
    assert [r["runs"] for r in rows] == [["a1", "a2"], ["b1", "b2"]]
    ends = [(r["chosen"][-1], r["rejected"][-1]) for r in dataset(run_dir, tmp_path / "reward", "reward")]
    assert ends == [(reply("b1"), reply("c1")), (reply("b2"), reply("b3"))]


@pytest.mark.parametrize(("kind", "rows"), [("sft", 3), ("dpo", 1), ("reward", 1), ("kto", 2)])
def test_runs_that_must_not_train_or_have_no_reward_are_counted(kind: str, rows: int, tmp_path: Path) -> None:
    events = [e for i in range(5) for e in run(f"r{i}", "g", [user("go"), reply(f"a{i}")], i / 4)]
    for i, name in ((1, "no_result"), (2, "masked")):
        events[3 * i + 2] = msgspec.structs.replace(events[3 * i + 2], outcome=name)
    events[3 * 3 + 2] = msgspec.structs.replace(events[3 * 3 + 2], reward=None)
    fill(tmp_path / "run", *events)
    made = dataset(tmp_path / "run", tmp_path / "out", kind)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- 1 × a run with outcome no_result" in card
    assert "- 1 × a run with outcome masked" in card
    assert ("- 1 × a run without a reward" in card) == (kind != "sft")
    assert len(made) == rows


def test_kto_labels_each_reply_by_its_runs_reward_in_its_group(run_dir: Path, tmp_path: Path) -> None:
    """a3 has 0.5 by its agent and 0.75 by its verdict, which counts; the reward of a query counts before both. The mean
    of its group is 0.5833, of the query's rewards 2."""
    rows = dataset(run_dir, tmp_path / "out", "kto")
    replies = {name: [r["completion"][0]["content"] for r in rows if r["run"] == name] for name in GAMES}
    assert replies == {"a1": ["a1", "b1"], "a2": ["a1", "c1"], "a3": ["x9"], "b1": ["", "b2"], "b2": ["b3"], "c1": []}
    assert {r["run"] for r in rows if r["label"]} == {"a1", "a3", "b1"}
    assert {r["run"] for r in rows if not r["label"]} == {"a2", "b2"}
    by_query = """SELECT trajectory, CASE trajectory WHEN 'a3' THEN 6 ELSE 0 END AS reward
                  FROM trajectories WHERE task = 'one'"""
    rows = dataset(run_dir, tmp_path / "query", "kto", query=by_query)
    assert {(r["run"], r["label"]) for r in rows} == {("a1", False), ("a2", False), ("a3", True)}


def test_only_replies_that_the_model_sampled_are_rows_or_train(tmp_path: Path) -> None:
    few_shot = [user("2+2?"), reply("4"), user("3+3?")]
    events = [
        *run("r0", "g", [*few_shot, reply("6")], 1.0, examples=3),
        *run("r1", "g", [*few_shot, reply("7"), user("?")], 0.0, examples=3),
    ]
    fill(tmp_path / "run", *events)
    made = {kind: dataset(tmp_path / "run", tmp_path / kind, kind) for kind in ("kto", "sft")}
    assert [(r["prompt"], r["completion"], r["label"]) for r in made["kto"]] == [
        (few_shot, [reply("6")], True),
        (few_shot, [reply("7")], False),
    ]
    assert [(r["messages"], r["replies"]) for r in made["sft"]] == [
        ([*few_shot, reply("6")], [3]),
        ([*few_shot, reply("7")], [3]),
    ]


@pytest.mark.parametrize("kind", ["dpo", "kto", "reward"])
def test_runs_of_two_models_are_not_compared(kind: str, tmp_path: Path) -> None:
    runs: list[Any] = [run(f"r{i}", "g", [user("go"), reply(f"a{i}")], float(i < 2)) for i in range(4)]
    fill(tmp_path, *(msgspec.structs.replace(event, model=f"m{i // 2}") for i in range(4) for event in runs[i]))
    assert command.main([ALL, "--as", kind, "--out", str(tmp_path / "out"), "--run-dir", str(tmp_path)]) == 1


def test_held_out_runs_are_left_out(tmp_path: Path) -> None:
    first, *calls, last = run("a2", *GAMES["a2"])
    ends: list[Any] = [first, last]
    held_out = [msgspec.structs.replace(event, split="val") for event in ends]
    fill(tmp_path / "run", *run("a1", *GAMES["a1"]), *calls, *held_out)
    assert [row["run"] for row in dataset(tmp_path / "run", tmp_path / "out", "sft")] == ["a1"]
    assert "1 × a held-out run (split val)" in (tmp_path / "out" / "README.md").read_text()


def test_the_same_query_writes_the_same_bytes_however_the_store_is_laid_out(run_dir: Path, tmp_path: Path) -> None:
    dataset(run_dir, tmp_path / "one", "sft", *SHARE)
    for event in history():
        fill(tmp_path / "other", event)  # a file an event
    backwards = ALL + " ORDER BY trajectory DESC"
    dataset(tmp_path / "other", tmp_path / "two", "sft", *SHARE, query=backwards)
    one, two = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in ("one", "two"))
    assert one.keys() == two.keys() == {"train.jsonl", "train.parquet", "test.jsonl", "test.parquet", "README.md"}
    assert {n for n in one if one[n] != two[n]} == {"README.md"}
    assert one["README.md"].replace(ALL.encode(), backwards.encode()) == two["README.md"]
    card = one["README.md"].decode()
    assert all(hashlib.sha256(one[n]).hexdigest() in card for n in one if n != "README.md")
    assert "`m@0` (6 runs), adapters of\n`org/base`" in card


def test_a_task_stays_in_its_split(run_dir: Path, tmp_path: Path) -> None:
    def splits(out: Path) -> dict[str, str]:
        files = [(split, out / f"{split}.jsonl") for split in folder.SPLITS]
        lines = [(split, line) for split, file in files if file.exists() for line in file.read_text().splitlines()]
        return {json.loads(line)["task"]: split for split, line in lines}

    dataset(run_dir, tmp_path / "all", "sft", *SHARE)
    dataset(run_dir, tmp_path / "few", "sft", *SHARE, query=ALL + " WHERE task = 'two'")
    of_all = splits(tmp_path / "all")
    assert len(set(of_all.values())) == 2
    assert splits(tmp_path / "few") == {"two": of_all["two"]}


@pytest.mark.parametrize("place", ["one", "two"])
def test_the_splits_have_one_schema_also_if_a_field_occurs_in_one_of_them_only(place: str, tmp_path: Path) -> None:
    """`datasets` does not load files whose columns differ."""
    assert len({folder.split_of(task, 0.3) for task in ("one", "two")}) == 2
    called = [user("go"), reply("", tool_calls=CALLED)]
    said = {task: called if task == place else [user("go"), reply("a")] for task in ("one", "two")}
    fill(tmp_path / "run", *(event for task in said for event in run(task, task, said[task], 1.0)))
    dataset(tmp_path / "run", tmp_path / "out", "sft", *SHARE)
    schemas = [pq.read_schema(tmp_path / "out" / f"{split}.parquet") for split in folder.SPLITS]
    assert schemas[0] == schemas[1]
    assert "tool_calls" in str(schemas[0])


def test_files_of_an_earlier_data_set_go_once_the_new_ones_are_written(tmp_path: Path) -> None:
    folder.write(dict.fromkeys(("train.jsonl", "test.jsonl", "README.md"), b"old"), tmp_path)
    (tmp_path / "notes.txt").write_bytes(b"mine")
    (tmp_path / "train.parquet").mkdir()  # can't be replaced by a file
    with pytest.raises(IsADirectoryError):
        folder.write({"train.jsonl": b"new", "train.parquet": b"new"}, tmp_path)
    assert (tmp_path / "test.jsonl").read_bytes() == b"old"
    (tmp_path / "train.parquet").rmdir()
    folder.write({"train.jsonl": b"new", "README.md": b"new"}, tmp_path)
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert found == {"train.jsonl": b"new", "README.md": b"new", "notes.txt": b"mine"}


@pytest.mark.parametrize(
    ("query", "kind", "code", "said"),
    [
        ("SELECT 1 AS x", "sft", 2, "no column `trajectory`"),
        ("SELECT nothing FROM trajectories", "sft", 2, "nothing"),
        (ALL + " WHERE false", "sft", 1, "no row of format sft: the query selects no complete run"),
        ("SELECT 'a1' AS trajectory, unnest([1, 2]) AS reward", "kto", 2, "two rewards for run a1"),
        ("SELECT 'c1' AS trajectory", "sft", 1, "1 × a conversation with images, audio or files"),
    ],
)
def test_what_gives_no_data_set_is_an_error(
    query: str, kind: str, code: int, said: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [query, "--as", kind, "--out", str(tmp_path / "out"), "--run-dir", str(run_dir)]
    assert command.main(arguments) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "reward"])
def test_trls_trainer_takes_a_step(kind: str, tmp_path: Path) -> None:
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from trainer.trl_trainers import plain_logprobs, trl_imports

    with trl_imports():
        import trl

    texts = {
        n: (g, [user(f"a1=. b1=x {n[0]}"), reply(n[1])], float(n[1] == "1"))
        for n, g in ((f"{g}{i}", g) for g in "abcd" for i in "12")
    }
    fill(tmp_path / "run", *(e for n, (g, said, reward) in texts.items() for e in run(n, g, said, reward)))
    dataset(tmp_path / "run", tmp_path / "out", kind)
    data = load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))
    name = "Reward" if kind == "reward" else kind.upper()
    config_of, trainer_of = getattr(trl, f"{name}Config"), getattr(trl, f"{name}Trainer")
    kinds = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    options = {"num_labels": 1} if kind == "reward" else {}
    model, tokenizer = kinds.from_pretrained(BASE, **options), AutoTokenizer.from_pretrained(BASE)
    before = [p.detach().clone() for p in model.parameters()]
    settings = config_of(
        output_dir=str(tmp_path / "trl"),
        max_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        bf16=False,
    )
    with plain_logprobs("cpu"):
        trainer_of(model=model, args=settings, train_dataset=data, processing_class=tokenizer).train()
    assert any(not (a == b).all() for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.slow
def test_the_pages_lines_train_with_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that was: the page did not say what this test wrapped around the trainer, which fails without."""
    page = (ROOT / "docs" / "store.md").read_text("utf-8").partition("## With TRL's own trainers\n")[2]
    lines = page.partition("```python\n")[2].partition("```")[0]
    fill(tmp_path / "run", *run("a1", "a", [user("a1=. b1=x"), reply("1")], 1.0))
    dataset(tmp_path / "run", tmp_path / "data" / "good", "sft")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    exec(lines.replace("BASE", str(BASE)), {})
    assert list((tmp_path / "data" / "trained").iterdir())
