"""A database with the tables that a comparison reads."""

from collections.abc import Iterator

import duckdb
import pytest

from tests.store.evidence.kit import TABLES


@pytest.fixture
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect(config={"threads": "1"}) as found:
        found.execute(TABLES)
        yield found
