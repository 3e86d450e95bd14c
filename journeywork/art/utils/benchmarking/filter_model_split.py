"""A part of a table of trajectories."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from journeywork.art.utils.benchmarking.types import BenchmarkModelKey


def filter_rename_model_split(df: Any, models: Sequence[BenchmarkModelKey]) -> Any:
    """Return the rows of a `polars.DataFrame` that are of one of the models and its split, under the shown names."""
    polars: Any = importlib.import_module("polars")
    parts = (
        df.filter(polars.col("model") == key.name, polars.col("split") == key.split).with_columns(
            model=polars.lit(key.display_name)
        )
        for key in models
    )
    return polars.concat(parts)
