"""The shop: a small SQLite database for each scenario, a question about it, and the agent's two tools.

A scenario is fixed by its number and seed. The table's amounts stand in a column whose name differs from scenario to
scenario, so an agent has to look at the schema, or to learn from an error.
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
from dataclasses import dataclass

ITEMS = ("tea", "rice", "salt", "corn", "wool", "silk")
CITIES = ("Oslo", "Lima", "Cairo", "Delhi", "Quito", "Accra")
COLUMNS = ("amount", "price", "total", "cost")
"""Possible names of the column that holds what an order cost."""
QUESTIONS = {
    "count": "How many orders were there",
    "sum": "What was the sum of all orders",
    "max": "What was the largest order",
    "min": "What was the smallest order",
}
"""Beginning of the question by the SQL function that answers it."""
SYSTEM = (
    "You answer questions about the orders of a shop. They are in a table of a SQLite database. Find its columns with "
    "the tool `schema`, run SQL with the tool `query`, and then answer with the number alone."
)
_SHOWN = 200
"""Characters of a tool's answer, at most."""
_INSTRUCTIONS = 100_000
"""Instructions of SQLite's machine after which a query is ended."""
_LONGEST = 100_000
"""Bytes of the longest value."""
_ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)


@dataclass(frozen=True)
class Scenario:
    """One question about one database."""

    function: str
    item: str
    city: str
    column: str
    rows: tuple[tuple[str, str, int], ...]

    @property
    def question(self) -> str:
        return f"{QUESTIONS[self.function]} for {self.item} from {self.city}?"

    def call(self, tool: str, arguments: dict[str, object]) -> str:
        """Run a tool and return what it says; an error is an answer too, which begins with `Error:`."""
        if tool == "schema":
            return f"orders(item, city, {self.column})"
        if tool != "query":
            return f"Error: no tool {tool}"
        with contextlib.closing(sqlite3.connect(":memory:")) as database:
            database.execute(f"CREATE TABLE orders (item TEXT, city TEXT, {self.column} INTEGER)")
            database.executemany("INSERT INTO orders VALUES (?, ?, ?)", self.rows)
            # The model writes the SQL: it may read the table, for a while, and do nothing else.
            database.set_authorizer(lambda action, *_: int(action not in _ALLOWED))
            database.set_progress_handler(lambda: 1, _INSTRUCTIONS)
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
            try:
                selected = database.execute(str(arguments.get("sql", ""))).fetchmany(10)
            except sqlite3.Error as error:
                return f"Error: {error}"[:_SHOWN]
        return "\n".join(", ".join(map(str, row)) for row in selected)[:_SHOWN]


def scenario(number: int, seed: int) -> Scenario:
    draw = random.Random(f"{seed}/{number}")
    item, city = draw.choice(ITEMS), draw.choice(CITIES)
    rows = [(item, city, draw.randint(1, 24)) for _ in range(draw.randint(2, 4))]
    rows += [(item, draw.choice([c for c in CITIES if c != city]), draw.randint(1, 24)) for _ in range(3)]
    rows += [(draw.choice([i for i in ITEMS if i != item]), city, draw.randint(1, 24)) for _ in range(3)]
    draw.shuffle(rows)
    return Scenario(draw.choice(list(QUESTIONS)), item, city, draw.choice(COLUMNS), tuple(rows))
