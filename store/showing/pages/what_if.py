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
    """Every answer, with the measures of the version of `main`, and of each variant with its measures and the version
    of `main` that adopted it, if one did."""
    shown = list_page(history, query, _ANSWERS, {"when": '"at"', "model": "model"}, equal=("model",))
    evaluations = dict.fromkeys(row["evaluation"] for row in shown["rows"])
    measured: dict[tuple[str, str], list[Row]] = {}
    if evaluations:
        measures = f"""SELECT * FROM evaluations WHERE {is_one_of("evaluation", evaluations)}
            ORDER BY position, measure <> 'reward', measure"""  # noqa: S608
        for row in history.rows(measures, numbered_parameters(evaluations)):
            measured.setdefault((row["evaluation"], row["entrant"]), []).append(row)
    adopted = {row["source"].rpartition("#")[2]: row["version"] for row in history.rows(_ADOPTED)}
    answers = []
    for row in shown["rows"]:
        variants = [_variant(row["model"], variant) for variant in row["variants"] or ()]
        for variant in variants:
            variant["measures"] = measured.get((row["evaluation"], variant["version"]), [])
            variant["adopted"] = adopted.get(variant["source"], "")
        baseline = measured.get((row["evaluation"], row["baseline"]), [])
        answers.append({**row, "variants": variants, "baseline_measures": baseline})
    return {**shown, "rows": answers, "run_dir": history.config.run_dir}


def _variant(model: str, variant: Row) -> Row:
    """A variant with its settings by name, the name of its version on its branch, and what `train --adopt` takes after
    the lake."""
    version = f"{model}@{variant['version'].rpartition('@')[2]}"
    return {
        **variant,
        "settings": msgspec.json.decode(variant["settings"]),
        "of_branch": version,
        "source": version_address(variant["branch"], version),
    }
