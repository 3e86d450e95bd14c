"""What would have been learned under other settings: the answers of `journeywork what-if`."""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.names import version_address
from store.showing.pages.history import History, Row
from store.showing.pages.lists import Query, is_one_of, list_page, numbered_parameters

_ANSWERS = "(SELECT *, log_seq AS stream_seq FROM policy_what_if)"
_ADOPTED = "SELECT version, source FROM checkpoints WHERE branch = 'main' AND source <> ''"


def what_if(history: History, query: Query) -> dict[str, Any]:
    """Return the page of the answers of `journeywork what-if`: of each the measures of `main`'s version, and the
    variants with their measures and the version of `main` that adopted them (empty if none did)."""
    page = list_page(history, query, _ANSWERS, {"when": '"at"', "model": "model"}, equal=("model",))
    evaluations = dict.fromkeys(row["evaluation"] for row in page["rows"])
    measured: dict[tuple[str, str], list[Row]] = {}
    if evaluations:
        measures = f"""SELECT * FROM evaluations WHERE {is_one_of("evaluation", evaluations)}
            ORDER BY position, measure <> 'reward', measure"""  # noqa: S608
        for row in history.rows(measures, numbered_parameters(evaluations)):
            measured.setdefault((row["evaluation"], row["entrant"]), []).append(row)
    adopted = {row["source"].rpartition("#")[2]: row["version"] for row in history.rows(_ADOPTED)}
    answers = []
    for row in page["rows"]:
        variants = [_variant(row["model"], variant) for variant in row["variants"] or ()]
        for variant in variants:
            variant["measures"] = measured.get((row["evaluation"], variant["version"]), [])
            variant["adopted"] = adopted.get(variant["source"], "")
        baseline = measured.get((row["evaluation"], row["baseline"]), [])
        answers.append({**row, "variants": variants, "baseline_measures": baseline})
    return {**page, "rows": answers, "run_dir": history.config.run_dir}


def _variant(model: str, variant: Row) -> Row:
    """Return a variant with its settings by name, its version's name on its branch (`of_branch`), and the address that
    `train --adopt` takes after the lake (`source`)."""
    version = f"{model}@{variant['version'].rpartition('@')[2]}"
    return {
        **variant,
        "settings": msgspec.json.decode(variant["settings"]),
        "of_branch": version,
        "source": version_address(variant["branch"], version),
    }
