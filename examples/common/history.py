"""SQL over a run's history, as `journeywork sql` answers it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from store.reading.sql import connect, write_result


def ask(run_dir: Path, query: str, form: str = "table") -> str:
    """Return the answer to a query as a table or as JSON. Raises `StoreError` before anything is stored."""
    out = io.BytesIO()
    with connect(run_dir) as connection:
        write_result(connection.sql(query), form, out)
    return out.getvalue().decode()


def rows(run_dir: Path, query: str) -> list[dict[str, Any]]:
    """Return the rows of a query."""
    answer: list[dict[str, Any]] = json.loads(ask(run_dir, query, "json"))
    return answer
