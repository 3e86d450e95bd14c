"""The view of whether the training reward moved."""

from __future__ import annotations

from pipeline.statistics.progress import MOST_STEPS, SHARE
from store.reading.views.view import View


def _block(name: str, condition: str) -> str:
    aggregates = {"mean": "avg", "variance": "var_samp", "least": "min", "greatest": "max"}
    return f"count(*) FILTER ({condition}) AS {name}_groups, " + ", ".join(
        f"{function}(reward) FILTER ({condition}) AS {name}_{column}" for column, function in aggregates.items()
    )


PROGRESS = View(
    "progress",
    "Whether the training reward moved: one row per model and branch, with the scored groups that the first versions "
    f"sampled and those that the last versions sampled: a fifth of the versions each, at most {MOST_STEPS}.",
    {
        "first_step": "The first step that sampled a training group; 0 is the base model.",
        "last_step": "The last one.",
        **{
            f"{block}_{column}": f"{what} of the groups of the {block} versions."
            for block in ("first", "last")
            for column, what in {
                "groups": "Number",
                "mean": "Mean over the groups",
                "variance": "Sample variance over the groups",
                "least": "Least mean",
                "greatest": "Greatest mean",
            }.items()
        },
    },
    f"""
        WITH played AS (
          SELECT project, model, branch, group_id, max(last_step) AS step, avg(reward) AS reward FROM rewards
          WHERE split = 'train' AND outcome = 'scored' AND NOT offline AND last_step IS NOT NULL AND isfinite(reward)
          GROUP BY ALL
        ), spans AS (
          SELECT project, model, branch, min(step) AS first_step, max(step) AS last_step,
            least({MOST_STEPS}, (max(step) - min(step)) // {SHARE} + 1) AS width
          FROM played GROUP BY ALL
        )
        SELECT project, model, branch, first_step, last_step,
          {_block("first", "step < first_step + width")},
          {_block("last", "step > last_step - width")}
        FROM played JOIN spans USING (project, model, branch) GROUP BY ALL
        """,  # noqa: S608 - constants of this project
)
