"""`journeywork dataset`: runs of the history as files that TRL's trainers take.

    journeywork dataset "SELECT trajectory FROM trajectories WHERE reward >= 1" --as sft --out data/good
    journeywork dataset "SELECT trajectory FROM trajectories" --as dpo --out data/pairs

The query returns the ids of runs in a column `trajectory`, and may return a `reward` that counts instead of the run's.
The formats are in docs/store.md. The same query over the same history writes the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import ConfigError
from pipeline.running.installations import installation_settings
from pipeline.terminal.parsers import command_parser
from pipeline.terminal.printing import visible
from store.datasets.folder import Source, files_of, write
from store.datasets.rows import FORMATS, rows_of
from store.datasets.runs import select
from store.lake.storage import StoreError
from store.reading import sql
from store.reading.options import add_installation, run_command


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("dataset", "Write runs of the history as files for TRL's trainers.")
    parser.add_argument("query", help="returns ids of runs in a column `trajectory`, perhaps a column `reward`")
    parser.add_argument("--as", required=True, choices=tuple(FORMATS), dest="kind", help="format")
    parser.add_argument("--out", required=True, type=Path, help="folder")
    parser.add_argument("--test-share", type=float, default=0.0, help="share of tasks in the split `test`; default 0")
    add_installation(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, or an error's status (`run_command`): 1 if there is no row."""
    return run_command(_parser(), _run, argv)


def _run(args: argparse.Namespace) -> int:
    if not 0 <= args.test_share < 1:
        raise ConfigError(f"--test-share {args.test_share:g}: give a share from 0 to below 1")
    config = installation_settings(args.run_dir, args.config, sections=("store", "outside"))
    with sql.connect(config) as connection:
        runs = select(connection, args.query)
        bases = connection.execute(
            "SELECT DISTINCT base_model FROM checkpoints WHERE list_contains($models, model) ORDER BY ALL",
            {"models": sorted({run.model for run in runs})},
        ).fetchall()
    rows, left_out = rows_of(runs, args.kind, config.may_train)
    if not rows:
        reasons = "; ".join(f"{n} × {why}" for why, n in left_out.items() if n)
        raise StoreError(f"no row of format {args.kind}: {reasons or 'the query selects no complete run'}")
    source = Source(args.query, args.kind, runs, [base for (base,) in bases], left_out)
    write(files_of(rows, source, args.test_share), args.out)
    unusable = "".join(f"  {count} × {why}\n" for why, count in left_out.items() if count) or "  nothing\n"
    sys.stdout.write(visible(f"{len(rows)} rows of {len(runs)} runs in {args.out}; left out:\n{unusable}"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
