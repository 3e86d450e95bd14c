"""The estimates of docs/gpu-in-an-hour.md."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.gpu_hour import GPUS, SHAPES, Work, estimate, tables

PAGE = Path(__file__).parents[2] / "docs" / "gpu-in-an-hour.md"


def test_the_page_holds_what_the_model_says() -> None:
    assert tables() in PAGE.read_text("utf-8"), "run `python -m benchmarks.gpu_hour`"


def test_shapes_have_the_published_sizes() -> None:
    # The model cards: 4.0 and 8.2 billion parameters.
    assert [round(shape.parameters / 1e9, 1) for shape in SHAPES] == [4.0, 8.2]
    assert {shape.cache_bytes for shape in SHAPES} == {147_456}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_more_work_takes_more_and_a_larger_gpu_less(shape: object) -> None:
    small, large = estimate(shape, GPUS[1]), estimate(shape, GPUS[2])  # type: ignore[arg-type]
    assert large.steps > small.steps > 0
    longer = estimate(shape, GPUS[2], dataclasses.replace(Work(), sampled=1200))  # type: ignore[arg-type]
    assert longer.sample_s > 1.8 * large.sample_s
    assert longer.train_s > large.train_s
    assert not estimate(shape, GPUS[0]).fits  # type: ignore[arg-type]
