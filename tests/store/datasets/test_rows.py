"""Rows of replies of every form: each field that the model sampled is in the row, or counted as left out."""

from dataclasses import replace
from typing import Any

import msgspec
import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.chat.conversations import build_conversations
from pipeline.config import Config
from store.datasets.rows import rows_of
from store.datasets.runs import Run
from tests.store.kit import exchange

Reply = dict[str, Any]

words = st.text("abcdefgh", min_size=1, max_size=6).map(lambda word: f"<{word}>")
calls = st.fixed_dictionaries(
    {"id": words, "function": st.fixed_dictionaries({"name": words, "arguments": words})}
) | st.fixed_dictionaries({"type": st.just("custom"), "custom": st.fixed_dictionaries({"input": words})})
texts = words | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": words}), max_size=2)
audio = st.fixed_dictionaries({"transcript": words})
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "content": texts | st.none() | st.integers() | st.lists(st.fixed_dictionaries({"type": words}), max_size=1),
    "reasoning": words | st.none() | audio,
    "reasoning_content": words | st.none(),
    "tool_calls": st.lists(calls, max_size=2) | st.none() | st.just(5) | st.lists(words, max_size=1),
    "refusal": words | st.none(),
    "audio": audio | st.none(),
    "function_call": st.fixed_dictionaries({"name": words, "arguments": words}),
    "thinking": words,
    "images": st.lists(words, max_size=2),
    "annotations": st.just([]) | st.none(),
}
replies: st.SearchStrategy[Reply] = st.fixed_dictionaries({"role": st.just("assistant")}, optional=VALUES)


def run_of(name: str, said: Reply, reward: float = 1.0) -> Run:
    """A run with one call, in one group with the others."""
    call = exchange(
        name,
        request=msgspec.json.encode({"messages": [{"role": "user", "content": "go"}]}),
        response=msgspec.json.encode({"choices": [{"message": said}]}),
    )
    conversations, _ = build_conversations([call])
    return Run("p", name, "g", "t", "m", "train", "scored", reward, ("m@1",), (b"",), conversations)


def leaves(value: Any) -> list[str]:
    """The texts and numbers in a value, but for names of types."""
    if isinstance(value, dict):
        return [leaf for name, inner in value.items() if name not in ("type", "role") for leaf in leaves(inner)]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in leaves(inner)]
    return [] if value is None else [str(value)]


@given(replies)
@example({"role": "assistant", "content": "<yes>", "reasoning": "<hm>"})
@example({"role": "assistant", "content": None, "refusal": "<no>"})
def test_each_sampled_field_of_a_reply_is_in_the_row_or_counted(said: Reply) -> None:
    rows, left_out = rows_of([run_of("r", said)], "sft", lambda _: True)
    assert len(rows) + sum(left_out.values()) == 1
    if rows:
        pa.Table.from_pylist(rows)
        assert all(isinstance(value, str | list) for value in rows[0]["messages"][1].values())
        in_row = "".join(leaves(rows[0]["messages"][1]))
        assert all(leaf in in_row for leaf in leaves(said))


def test_reasoning_stands_where_chat_templates_read_it_under_either_name() -> None:
    for name in ("reasoning", "reasoning_content"):
        (row,), _ = rows_of([run_of("r", {"content": "yes", name: "hm"})], "sft", lambda _: True)
        assert row["messages"][1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


def test_runs_of_outside_models_give_no_rows_unless_they_may_train() -> None:
    """A run that an outside model answered in part, too."""
    own, master, mixed = (run_of(name, {"role": "assistant", "content": "a"}) for name in ("a", "b", "c"))
    master = replace(master, versions=("outside:master",))
    runs = [own, master, replace(mixed, versions=("m@1", "outside:master"))]
    for kind in ("sft", "kto", "dpo", "reward"):
        _, left_out = rows_of(runs, kind, Config().may_train)
        assert left_out["a run of the outside model master, whose table does not say may_train"] == 2
    assert [row["run"] for row in rows_of(runs, "sft", Config().may_train)[0]] == ["a"]
    assert [row["run"] for row in rows_of(runs, "sft", lambda _: True)[0]] == ["a", "b", "c"]
