"""The folder of a data set: JSONL and Parquet of each split, and a card. The same rows give the same bytes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.files import write_whole
from store.datasets.rows import Row
from store.datasets.runs import Run

SPLITS = ("train", "test")
_DATA = tuple(f"{split}.{ending}" for split in SPLITS for ending in ("jsonl", "parquet"))


@dataclass(frozen=True)
class Source:
    """Where a data set comes from."""

    query: str
    kind: str
    runs: Sequence[Run]
    bases: Sequence[str]
    """The base models of the runs' versions."""
    left_out: Counter[str]


def split_of(key: str, test_share: float) -> str:
    """Return the split of the task `key`. The hash of this name decides, so the split stays when other tasks come or
    go."""
    hash_share = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
    return "test" if hash_share < test_share else "train"


def files_of(rows: Sequence[Row], source: Source, test_share: float) -> dict[str, bytes]:
    """Return the files of a data set by name: JSONL and Parquet of each split that has rows, and the card."""
    columns = dict.fromkeys(name for row in rows for name in row)
    full_rows: list[Row] = [{n: row.get(n, "[]" if n == "tools" else None) for n in columns} for row in rows]
    schema = pa.Table.from_pylist(full_rows).schema  # of all rows: a split may lack a field of another's messages
    files = {}
    for split in SPLITS:
        if own := [row for row in full_rows if split_of(row["task"], test_share) == split]:
            files[f"{split}.jsonl"] = b"".join(msgspec.json.encode(row) + b"\n" for row in own)
            sink = pa.BufferOutputStream()
            pq.write_table(pa.Table.from_pylist(own, schema), sink, compression="zstd")
            files[f"{split}.parquet"] = sink.getvalue().to_pybytes()
    files["README.md"] = _card(rows, source, test_share, files).encode()
    return files


def write(files: Mapping[str, bytes], out: Path) -> None:
    """Write the files in place of an earlier data set: first they replace its files of the same names, then its other
    JSONL and Parquet files are deleted. Other files stay. Raises `OSError`, before anything is deleted if it can't
    write."""
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_whole(out / name, content)
    for name in {*_DATA} - files.keys():
        (out / name).unlink(missing_ok=True)


def remove(out: Path) -> None:
    """Delete the files of a data set, and its folder if nothing else is in it. Files that are missing are skipped. The
    card is deleted last: by it, an erasure that was interrupted finds the folder again. Raises `OSError`."""
    for name in (*_DATA, "README.md"):
        (out / name).unlink(missing_ok=True)
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()


def _card(rows: Sequence[Row], source: Source, test_share: float, files: Mapping[str, bytes]) -> str:
    """Return the text of the data set's `README.md`, with the head that the Hugging Face hub reads."""
    calls = [c for run in source.runs for c in run.calls]
    versions = Counter(v for run in source.runs for v in run.versions)
    events = hashlib.sha256()
    for run in source.runs:
        events.update(run.trajectory.encode() + b"".join(hashlib.sha256(c).digest() for c in run.calls))
    splits = "".join(
        f"  - split: {split}\n    path: {split}.parquet\n" for split in SPLITS if f"{split}.parquet" in files
    )
    hashes = "".join(
        f"| `{name}` | {len(content):,} | `{hashlib.sha256(content).hexdigest()}` |\n"
        for name, content in sorted(files.items())
    )
    left_out = "".join(f"- {n:,} × {why}\n" for why, n in sorted(source.left_out.items()) if n) or "Nothing.\n"
    return f"""---
configs:
- config_name: default
  data_files:
{splits}---

# A data set of runs of agents

{len(rows):,} rows in the format `{source.kind}` of {len(source.runs):,} runs with {len(calls):,} model calls. Written
by `journeywork dataset` with the query

```sql
{source.query.strip()}
```

Sampled by {", ".join(f"`{v}` ({n:,} runs)" for v, n in sorted(versions.items())) or "no version"}, adapters of
{", ".join(f"`{b}`" for b in source.bases) or "a base model that the history does not name"}.
SHA-256 of the runs' ids and recorded calls: `{events.hexdigest()}`.

A task is in the split `test` if the hash of its name is in the lowest {test_share:g} of all, whatever else the data
holds.

| file | bytes | SHA-256 |
| --- | --- | --- |
{hashes}
## Left out

{left_out}
## Equal rows

{_repetitions(rows, test_share)}
## Licence

The command knows no licence. What the model wrote is subject to the licence of the base model, what agents, tools and
users wrote to their owners' rights. Check for personal data before you pass the files on.
"""


def _repetitions(rows: Sequence[Row], test_share: float) -> str:
    """Return sentences that say how many rows repeat another one in everything but their run and task."""
    splits: dict[bytes, list[str]] = {}
    for row in rows:
        text = msgspec.json.encode({k: v for k, v in row.items() if k not in ("run", "runs", "task")})
        splits.setdefault(hashlib.sha256(text).digest(), []).append(split_of(row["task"], test_share))
    repeated = sum(len(same) - 1 for same in splits.values())
    across = sum(len(same) for same in splits.values() if len({*same}) > 1)
    return f"{repeated:,} rows repeat an earlier one. {across:,} rows stand in both splits.\n"
