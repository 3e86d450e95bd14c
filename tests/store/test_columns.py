"""Events to Arrow and back without a change."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.events import Event, pack_ids, pack_logprobs, schema, wire_name
from store.lake import columns
from store.lake.storage import write_parquet
from store.reading import rebuild
from tests.store.kit import exchange, run_of_one_step


@pytest.mark.parametrize("event", run_of_one_step(), ids=wire_name)
def test_an_event_comes_out_of_parquet_as_it_went_in(event: Event, tmp_path: Path) -> None:
    tag = wire_name(event)
    table = columns.table(tag, [event], [1], [5], ["tp"])  # type: ignore[list-item]
    table.validate(full=True)
    write_parquet(str(tmp_path / "x.parquet"), tag, [table])
    back = pq.read_table(tmp_path / "x.parquet").cast(table.schema)
    assert back.equals(table)
    assert back.column_names == [c.name for c in schema.tables()[tag]]
    assert rebuild.events(type(event), back) == [event]


def test_token_arrays_become_lists_exactly() -> None:
    long = exchange("t", prompt_ids=pack_ids(range(5000)), sampled_ids=b"", logprobs=pack_logprobs([-1.5, -0.0]))
    table = columns.table("rollout.exchange", [exchange("t"), long, exchange("u")], [1, 2, 3], [0, 0, 0], [""] * 3)
    table.validate(full=True)
    assert table["prompt_ids"].to_pylist() == [[1, 2, 0], list(range(5000)), [1, 2, 0]]
    assert table["sampled_ids"].to_pylist() == [[3, 4], [], [3, 4]]
    assert table["logprobs"].to_pylist()[1] == [-1.5, -0.0]


def test_a_packed_array_of_odd_length_is_named() -> None:
    assert "no multiple of 4" in columns.why_unstorable(exchange("t", prompt_ids=b"123"))
    assert columns.why_unstorable(exchange("t")) == ""


def test_json_that_is_not_utf8_stays_readable() -> None:
    table = columns.table("rollout.exchange", [exchange("t", request=b'"\xff"')], [1], [0], [""])
    assert table["request"].to_pylist() == ['"�"']
