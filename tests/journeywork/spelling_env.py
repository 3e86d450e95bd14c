"""An environment of the package verifiers: the model is asked for a cell, and every reply gets a reward."""

from __future__ import annotations

from typing import Any


def load_environment(rows: int = 8, most: int = 40) -> Any:
    """`most`: characters of a reply that gets the whole reward."""
    import verifiers as vf
    from datasets import Dataset

    def near(completion: list[dict[str, str]], answer: str) -> float:
        return min(len(completion[-1]["content"]), most) / most

    def has_cell(completion: list[dict[str, str]], answer: str) -> float:
        return float(answer in completion[-1]["content"])

    def made(first: int) -> Dataset:
        return Dataset.from_list(
            [{"question": f"a1=x b{n % 3 + 1}=o", "answer": "c3"} for n in range(first, first + rows)]
        )

    rubric = vf.Rubric(funcs=[near, has_cell], weights=[1.0, 0.0])
    return vf.SingleTurnEnv(dataset=made(0), eval_dataset=made(100), rubric=rubric)
