"""One schema: classes, columns, reference pages and yesterday's recordings agree.

`recorded/` holds events as an earlier version encoded them. They are never rewritten: what this version can't read
any more is a log that someone can't read any more. `python -m tests.pipeline.events.test_schema` records kinds not
yet recorded."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from pipeline import events
from pipeline.events import EVENTS, Event, decode, encode, schema, wire_name

RECORDED = Path(__file__).parent / "recorded"


def sample(struct: type[msgspec.Struct]) -> Any:
    """An instance with a telling value in every field."""
    tables: dict[str, Any] = {
        "string": "s",
        "int64": 7,
        "float64": 0.5,
        "bool": True,
        "binary": b"\x00\xff",
        "json": b'{"k": 1}',
        "timestamp_us": 1_700_000_000_000_000,
        "list<int32>": events.pack_ids([1, 2]),
        "list<uint8>": b"\x01\x00",
        "list<float32>": events.pack_logprobs([-0.5]),
        "list<int64>": events.pack_seqs([2**40]),
    }

    def value(column: schema.Column) -> Any:
        if column.choices:
            return column.choices[-1]
        if column.kind == "list":
            assert column.item is not None
            return [value(column.item)]
        if column.kind == "map":
            assert column.item is not None
            return {"k": value(column.item)}
        if column.kind == "struct":
            return {f.name: value(f) for f in column.fields}
        return tables[column.kind]

    made = {c.name: value(c) for c in schema.columns(struct)}
    return msgspec.convert(made | {"type": wire_name(struct)}, struct, builtin_types=(bytes,))  # type: ignore[arg-type]


def frozen_fields() -> dict[str, dict[str, str]]:
    """Tag to field to column type, of today."""
    return {wire_name(cls): {c.name: c.type_name for c in schema.columns(cls)} for cls in EVENTS}


@pytest.mark.parametrize("cls", EVENTS, ids=wire_name)
def test_recorded_events_still_decode_to_what_was_recorded(cls: type[Event]) -> None:
    files = sorted(RECORDED.glob(f"{wire_name(cls)}.*.msgpack"))
    assert files, f"no recording of {wire_name(cls)}: run python -m tests.pipeline.events.test_schema"
    for file in files:
        event = decode(file.read_bytes())
        assert type(event) is cls
        then = msgspec.msgpack.decode(file.read_bytes())
        now = msgspec.msgpack.decode(encode(event))
        assert still_says(now, then)


def still_says(now: Any, then: Any) -> bool:
    """Whether `now` holds all that `then` did; maps may have gained fields, at any depth."""
    if isinstance(then, dict):
        return isinstance(now, dict) and all(k in now and still_says(now[k], v) for k, v in then.items())
    if isinstance(then, list):
        return isinstance(now, list) and len(now) == len(then) and all(map(still_says, now, then))
    return bool(now == then)


def test_no_field_that_was_recorded_went_away_or_changed_its_type() -> None:
    then = msgspec.json.decode((RECORDED / "fields.json").read_bytes(), type=dict[str, dict[str, str]])
    now = frozen_fields()
    for tag, fields in then.items():
        for name, kind in fields.items():
            got = now[tag].get(name, "nothing")
            # A struct may gain fields; the ones it had stay.
            assert got == kind or got.startswith(kind.rstrip(">")), f"{tag}.{name} was {kind}"


def test_no_field_is_called_as_a_column_of_the_envelope_is() -> None:
    for tag, columns in schema.tables().items():
        assert len({column.name for column in columns}) == len(columns), tag


@pytest.mark.parametrize("cls", EVENTS, ids=wire_name)
def test_every_event_survives_its_encoding_and_fields_that_a_newer_writer_adds(cls: type[Event]) -> None:
    event = sample(cls)
    assert decode(encode(event)) == event
    # Two events on one subject need ids that tell them apart.
    assert cls.unique_subject or {"message_id_format", "message_id"} & vars(cls).keys()
    assert event.message_id() == sample(cls).message_id() != ""
    newer = msgspec.msgpack.decode(encode(event)) | {"added_later": [1, {"x": 2}], "v": 2}
    assert decode(msgspec.msgpack.encode(newer)) == msgspec.structs.replace(event, v=2)


def test_docstrings_of_fields_reach_the_columns() -> None:
    columns = {c.name: c for c in schema.documented(events.ExchangeRecorded)}
    assert columns["seq"].doc.startswith("Position of the call")
    assert columns["status"].choices == ("complete", "cancelled", "failed", "unsure")
    assert columns["prompt_ids"].kind == "list<int32>"
    assert {c.name: c for c in schema.columns(events.TrajectoryCompleted)}["reward"].nullable


def test_a_packed_field_that_may_be_missing_may_be_null() -> None:
    packed = msgspec.Meta(extra={"column": "list<int32>"})
    kinds = [Annotated[bytes | None, packed], Annotated[bytes, packed] | None, Annotated[bytes, packed]]
    found = schema.columns(msgspec.defstruct("Packed", [(f"f{at}", kind) for at, kind in enumerate(kinds)]))
    assert {column.kind for column in found} == {"list<int32>"}
    assert [column.nullable for column in found] == [True, True, False]


@pytest.mark.parametrize("kind", [set[int], int | str, Literal[1, 2]], ids=str)
def test_a_field_without_a_column_type_is_refused(kind: Any) -> None:
    odd = msgspec.defstruct("Odd", [("values", kind)])
    with pytest.raises(schema.SchemaError, match="values"):
        schema.columns(odd)


def _record() -> None:
    RECORDED.mkdir(exist_ok=True)
    for cls in EVENTS:
        if not list(RECORDED.glob(f"{wire_name(cls)}.*.msgpack")):
            (RECORDED / f"{wire_name(cls)}.1.msgpack").write_bytes(encode(sample(cls)))
    fields = msgspec.json.format(msgspec.json.encode(frozen_fields()), indent=1)
    (RECORDED / "fields.json").write_bytes(fields + b"\n")


if __name__ == "__main__":
    _record()
