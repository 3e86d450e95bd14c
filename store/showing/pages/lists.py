"""Lists of rows: filters, order and paging, all of which are in the page's address."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import date
from typing import Any

from store.showing.pages.errors import PageError
from store.showing.pages.history import History, Row

Query = Mapping[str, str]
"""The parameters of a page's address."""

PAGE = 50
"""Rows of one page of a list."""
TASK_OR_GROUP = "(contains(lower(task), lower($task)) OR contains(lower(group_id), lower($task)))"
"""A condition for `list_page`: the text `task` is in the task or in the group's id."""
TRAINED_IN = """SELECT version, step, branch FROM checkpoints
    WHERE project = $project AND model = $model AND list_contains(groups, $group) ORDER BY step"""
"""The checkpoints that were trained on a group."""
_LAST_PAGE = 199
"""A list goes so far: the database keeps all rows up to those that are shown."""


def list_page(
    history: History,
    query: Query,
    source: str,
    columns: Mapping[str, str],
    key: str = "",
    first: str = "true",
    choices: Mapping[str, Collection[str]] | None = None,
    equal: Iterable[str] = (),
    **conditions: str,
) -> Row:
    """Return one page of the rows of `source`, SQL text of this program that can follow FROM, as `query` filters and
    orders them.

    `columns`: SQL expressions that the list can be ordered by, by their names in the address. `sort=<name>` orders from
    the lowest value up and `sort=-<name>` from the highest down, and the column `stream_seq` makes the order definite.
    Without `sort`, the first of `columns` orders, from the highest down, and rows for which the SQL condition `first`
    holds come before others. `key`: a column that tells rows apart; then only it is sorted, and the rest read
    afterwards. `equal`: columns that a parameter of their name must equal; `conditions`: other filters by parameter,
    SQL with `$<parameter>`; `choices`: the values that a filter can have, for filters that have few. Raises `PageError`
    for a parameter with another value."""
    sort = query.get("sort") or "-" + next(iter(columns))
    column, down = sort.removeprefix("-"), sort.startswith("-")
    if column not in columns:
        raise PageError(400, f"sort={sort[:40]!r}: choose one of {', '.join(columns)}, or -{column[:40]} and so on.")
    conditions |= {name: f"{name} = ${name}" for name in equal}
    filters = _filters(query, conditions, choices or {})
    where = " AND ".join(conditions[name] for name in filters) or "true"
    page = _page_number(query)
    direction = "DESC" if down else "ASC"
    order_by = "" if query.get("sort") or first == "true" else f"({first}) DESC, "
    order_by += f"{columns[column]} {direction} NULLS LAST, stream_seq {direction}"
    rows = history.rows(
        f"SELECT {key or '*'} FROM {source} WHERE {where} ORDER BY {order_by} "  # noqa: S608
        f"LIMIT {PAGE + 1} OFFSET {page * PAGE}",
        filters,
    )
    if key and rows:
        order = {row[key]: i for i, row in enumerate(rows)}
        whole_rows = f"SELECT * FROM {source} WHERE {is_one_of(key, order)}"  # noqa: S608
        rows = sorted(history.rows(whole_rows, numbered_parameters(order)), key=lambda row: order[row[key]])
    return {
        "rows": rows[:PAGE],
        "page": page,
        "more": len(rows) > PAGE and page < _LAST_PAGE,
        "sort": sort,
        "query": {name: value for name, value in query.items() if name != "page" and value},
    }


def _filters(query: Query, names: Iterable[str], choices: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Return the filters (of `names`) that the address sets, by name, with their values as the database reads them.
    Raises `PageError` for a value that is not among the filter's `choices`, or has not its form (`_FORMS`)."""
    filters = {name: value for name in names if (value := query.get(name, "").strip())}
    for name, allowed in choices.items():
        if name in filters and filters[name] not in allowed:
            raise PageError(400, f"{name}={filters[name][:40]!r}: choose one of {', '.join(allowed)}.")
    for name in _FORMS.keys() & filters.keys():
        parse, what = _FORMS[name]
        if (value := parse(filters[name])) is None:
            raise PageError(400, f"{name}={filters[name][:40]!r}: write {what}.")
        filters[name] = str(value)  # the database reads fewer forms
    return filters


def is_one_of(column: str, values: Collection[str]) -> str:
    """Return the SQL condition that `column` is one of `values`, for the parameters `numbered_parameters(values)`.
    DuckDB applies such a list of parameters to the statistics of the files, so it reads only the parts that may hold
    the values."""
    return f"{column} IN ({', '.join(f'${name}' for name in numbered_parameters(values))})"


def numbered_parameters(values: Iterable[str]) -> dict[str, str]:
    """Return the parameters of `is_one_of`: the values by the names `value0`, `value1` and so on."""
    return {f"value{i}": value for i, value in enumerate(values)}


def _page_number(query: Query) -> int:
    """Return the number of the page that the address names, from 0. Raises a 400 `PageError`."""
    text = query.get("page") or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 5 and int(text) <= _LAST_PAGE):
        raise PageError(400, f"page={text[:40]!r}: write a number from 0 to {_LAST_PAGE}. Filters shorten a list.")
    return int(text)


def as_step(text: str) -> int | None:
    """Return the number of a step, or of a call; `None` if `text` is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _as_number(text: str) -> float | None:
    """Return a finite number; `None` if `text` is none."""
    with contextlib.suppress(ValueError):
        return value if math.isfinite(value := float(text)) else None
    return None


def _as_day(text: str) -> date | None:
    """Return a day in ISO 8601; `None` if `text` is none."""
    with contextlib.suppress(ValueError):
        return date.fromisoformat(text)
    return None


_FORMS: dict[str, tuple[Callable[[str], Any], str]] = {
    "step": (as_step, "the number of a policy step"),
    "least": (_as_number, "a number"),
    "most": (_as_number, "a number"),
    "since": (_as_day, "a day such as 2026-01-31"),
    "until": (_as_day, "a day such as 2026-01-31"),
}
"""Filters whose values have a form, with the function that returns `None` for another one."""


def branch_of(query: Query) -> str:
    """Return the branch that the address names, `main` if it names none."""
    return query.get("branch") or "main"
