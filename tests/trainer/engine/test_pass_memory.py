"""The formulas of docs/training.md for the memory of a pass, against what PyTorch allocates."""

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.trainer.kit import settings
from trainer.batches.examples import Example
from trainer.engine import loading
from trainer.engine.engine import Engine
from trainer.sequences import TokenSequence

pytestmark = pytest.mark.timeout(600)

LOGITS = 4_000_000
"""Largest number of logits at once in these tests; 32 million otherwise."""
RANK = 4


@dataclasses.dataclass(frozen=True)
class Shape:
    """A Qwen3. Letters as in docs/training.md: V vocabulary, D hidden size, I inner size of the MLP, A query heads
    times their size, K the same of the key heads, L layers; T tokens of a pass, N trained ones."""

    V: int = 1000
    D: int = 256
    I: int = 768  # noqa: E741 - as in the docs
    A: int = 256
    K: int = 128
    L: int = 2
    T: int = 512
    N: int = 16

    def save(self, folder: Path) -> None:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=self.V,
            hidden_size=self.D,
            intermediate_size=self.I,
            num_hidden_layers=self.L,
            num_attention_heads=self.A // 64,
            num_key_value_heads=self.K // 64,
            head_dim=64,
            max_position_embeddings=32_768,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
        Qwen3ForCausalLM(config).save_pretrained(folder)

    def engine(self, folder: Path, **trainer: object) -> Engine:
        self.save(folder)
        fixed: dict[str, object] = {"lora.rank": RANK, "memory.packing": "padded", "memory.tokens_per_batch": self.T}
        config = settings(str(folder), folder, **fixed | trainer).trainer
        return Engine(str(folder), config)

    def make_pass(self, engine: Engine, *, cuts: bool = False) -> None:
        """One forward and backward pass."""
        sequence = TokenSequence.made_up("t", np.random.default_rng(0).integers(2, self.V, self.T), self.N)
        if cuts:
            of_each = np.tile(np.array([50, 0.9, 0.0], np.float32), (self.T, 1))
            sequence = dataclasses.replace(sequence, cuts=of_each)
        engine.passes.gradients([Example(sequence, 1.0)], [0])

    def peak(self, dtype: str, checkpointing: bool, logit_bytes: int) -> float:
        """The bytes of a pass, by the formulas of docs/training.md."""
        D, I, A, K, T = self.D, self.I, self.A, self.K, self.T  # noqa: E741 - as in the docs
        if dtype == "float32":
            width, layer, working = 4, 4 * (4 * D + 4 * I + 3 * A + 3 * K + 7 * RANK), 8 * I
        else:
            width, layer, working = 2, 28 * D + 10 * I + 12 * A + 8 * K + 28 * RANK, 12 * D + 4 * I
        saved = T * self.L * (width * D if checkpointing else layer)
        recomputed = T * (working + (layer if checkpointing else 0))
        return saved + max(logit_bytes * min(self.N * self.V, LOGITS), recomputed)


class Allocated(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
    """Counts the bytes of the storages that operations return while they are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._alive:
                self._alive[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage._cdata)
        return out

    def _free(self, storage: int) -> None:
        self.now -= self._alive.pop(storage)


_SHAPES = {
    "small": Shape(),
    "deep": Shape(L=4),
    "wide": Shape(D=512),
    "large MLP": Shape(I=1536),
    "many heads": Shape(A=512, K=256),
    "logits at once": Shape(V=15_000, D=64, I=128, A=64, K=64, T=256, N=255),
    "logits in chunks": Shape(V=20_000, D=64, I=128, A=64, K=64, T=320, N=300),
}


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, "float32") for shape in _SHAPES),
        *((shape, "bfloat16") for shape in _SHAPES if not shape.startswith("logits")),
    ],
)
def test_a_pass_takes_the_memory_of_the_formula(
    shape: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.engine.model._MAX_LOGITS", LOGITS)
    sizes = _SHAPES[shape]
    if dtype == "bfloat16":
        sizes = dataclasses.replace(sizes, T=64)  # a CPU is slow at it
    engine = sizes.engine(tmp_path, dtype=dtype)
    for checkpointing in (False, True):
        if checkpointing:
            assert loading.enable_checkpointing(engine.model.forward.model, required=True)
        with Allocated() as allocated:
            sizes.make_pass(engine)
        assert allocated.peak == pytest.approx(sizes.peak(dtype, checkpointing, 16), rel=0.1), checkpointing


@pytest.mark.parametrize("cuts", [False, True], ids=["trained entropy", "top_k and top_p"])
def test_a_logit_takes_20_bytes_with_a_trained_entropy_or_cuts(cuts: bool, tmp_path: Path) -> None:
    shape = dataclasses.replace(_SHAPES["logits at once"], V=12_000)
    engine = shape.engine(tmp_path, dtype="float32", **({} if cuts else {"loss.entropy_coef": 0.1}))
    with Allocated() as allocated:
        shape.make_pass(engine, cuts=cuts)
    assert allocated.peak == pytest.approx(shape.peak("float32", False, 20), rel=0.1)
