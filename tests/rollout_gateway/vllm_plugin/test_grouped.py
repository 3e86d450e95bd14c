"""Our products against vLLM's own kernels, on random batches. vLLM's file is loaded by its path: it imports torch
only."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rollout_gateway.vllm_plugin import grouped


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    file = Path(found.origin).parent / "lora" / "ops" / "torch_ops" / "lora_ops.py"
    spec = importlib.util.spec_from_file_location("vllm_lora_ops", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Batch:
    """Rows of several adapters, in random order or as neighbours, and rows without adapter. The last slot is empty:
    there vLLM's kernels find the adapter of rows without one."""

    slots: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @classmethod
    def draw(cls, seed: int, dtype: torch.dtype) -> Batch:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

        def normal(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(of)

        rows, adapters = rng.choice((1, 2, 7, 40)), rng.choice((1, 2, 5))
        inputs, outputs, rank = rng.choice((3, 48)), rng.choice((5, 64)), rng.choice((1, 8, 16))
        present = rng.choice(([grouped.NO_ADAPTER], [0], list(range(-1, adapters)), list(range(adapters))))
        slots = [rng.choice(present) for _ in range(rows)]
        if rng.random() < 0.5:
            slots.sort()
        a, b = normal(adapters + 1, 1, rank, inputs), normal(adapters + 1, 1, outputs, rank)
        a[-1] = b[-1] = 0
        return cls(torch.tensor(slots), normal(rows, inputs), normal(rows, outputs), a, b, rng.choice((1.0, 0.25)))


def assert_close(found: torch.Tensor, expected: torch.Tensor, terms: torch.Tensor, count: int) -> None:
    """Both are sums of `count` products, whose absolute values add up to `terms`, rounded in the precision of
    `expected` at most once per product and four times more."""
    limit = terms.double() * (count + 4) * torch.finfo(expected.dtype).eps
    excess = (found.double() - expected.double()).abs() - limit
    assert excess.max() <= 0, f"{excess.max()} beyond rounding"


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_a_layer_of_several_parts_equals_that_of_vllm(kernels: ModuleType, seed: int, dtype: torch.dtype) -> None:
    """As the layer for queries, keys and values, whose parts have columns of one output."""
    batch, other = Batch.draw(seed, dtype), Batch.draw(seed, dtype)
    parts = ((batch.a, batch.b), (other.a * 0.5, torch.cat((other.b, other.b), dim=2)))
    widths = [b.shape[2] for _, b in parts]
    y = torch.cat((batch.y, batch.y, batch.y), dim=1)
    expected, terms, offset = y.clone(), y.abs().float(), 0
    for (a, b), width in zip(parts, widths, strict=True):
        low = torch.zeros(len(batch.slots), a.shape[-2])
        kernels.bgmv_shrink(batch.x, a, low, batch.slots, batch.scale)
        kernels.bgmv_expand_slice(low, b, expected, batch.slots, offset, width, True)
        absolute = torch.einsum("bi,bri->br", batch.x.abs().float(), a[batch.slots, 0].abs().float())
        part = torch.einsum("br,bor->bo", absolute, b[batch.slots, 0].abs().float())
        terms[:, offset : offset + width] += batch.scale * part
        offset += width
    lists: tuple[Any, Any] = tuple(zip(*parts, strict=True))
    grouped.add_linear(y, batch.x, *lists, batch.scale, widths, grouped.group_rows(batch.slots))
    assert_close(y, expected, terms, batch.x.shape[1] + batch.a.shape[-2])


def test_a_row_without_adapter_does_not_get_the_adapter_of_the_last_slot(kernels: ModuleType) -> None:
    """vLLM's kernels take slot -1 for the last one. That is why `journeywork up` leaves one slot empty on CPU."""
    slots = torch.tensor([-1, 1])
    x, y = torch.ones(2, 4), torch.zeros(2, 3)
    a, b = torch.ones(2, 1, 8, 4), torch.ones(2, 1, 3, 8)
    theirs, low = y.clone(), torch.zeros(2, 8)
    kernels.bgmv_shrink(x, a, low, slots, 1.0)
    kernels.bgmv_expand(low, b, theirs, slots, True)
    grouped.add_linear(y, x, (a,), (b,), 1.0, (3,), grouped.group_rows(slots))
    assert theirs.tolist() == [[32.0] * 3] * 2
    assert y.tolist() == [[0.0] * 3, [32.0] * 3]
