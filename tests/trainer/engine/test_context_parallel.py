"""Rows divided among processes: their parts, and what can't be divided. Steps of real processes are compared with those
of one in `test_parallel.py`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipeline.config import ConfigError, TrainerConfig, load
from pipeline.config.checks import check_trainer
from tests.kits.settings import with_values
from tests.trainer.engine.test_families import conversations
from trainer.batches.packing import Layout, padded, prefix_shared
from trainer.engine.context_parallel import ContextGroup, context_attention

SIZE = 4


def groups(monkeypatch: pytest.MonkeyPatch, *, masked: bool = False) -> list[ContextGroup]:
    """Those of four processes."""
    monkeypatch.setattr(dist, "new_subgroups", lambda size: (None, None))
    return [ContextGroup(SIZE, processes(rank), decoder(heads=(4, 8)), masked=masked) for rank in range(SIZE)]


def processes(rank: int = 0, size: int = SIZE) -> Any:
    return SimpleNamespace(rank=rank, size=size)


def decoder(heads: tuple[int, ...], attention: str = "sdpa") -> Any:
    """A decoder whose layers have so many heads each."""
    module = torch.nn.Linear(1, 1)
    layers = [SimpleNamespace(num_attention_heads=n) for n in heads]
    module.config = SimpleNamespace(per_layer_config=layers, _attn_implementation=attention)
    return module


def layouts() -> dict[str, Layout]:
    """With the choices of experts and the limits of sampling."""
    sequences, members = conversations()
    rng = np.random.default_rng(0)
    whole = [
        replace(
            s,
            experts=rng.integers(0, 8, (len(s.ids), 2, 3)).astype(np.int16),
            cuts=rng.random((len(s.ids), 3), np.float32),
        )
        for s in sequences
    ]
    return {"padded": padded(whole), "prefix": prefix_shared(whole, members)}


@pytest.mark.parametrize("name", ["padded", "prefix"])
def test_the_parts_of_rows_are_the_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layouts()[name]
    members = groups(monkeypatch)
    whole = members[0].whole(layout)
    parts = [member.part(whole) for member in members]
    (rows, length), width = layout.ids_RL.shape, parts[0].ids_RL.shape[1]
    assert length < SIZE * width < length + SIZE  # there is padding
    for tensor in ("ids_RL", "experts_RLMk"):
        joined = torch.cat([getattr(part, tensor) for part in parts], 1)
        torch.testing.assert_close(joined[:, :length], getattr(layout, tensor))
    positions = torch.cat([part.positions_RL for part in parts], 1)[:, :length]
    own = torch.arange(length).expand(rows, -1) if layout.positions_RL is None else layout.positions_RL
    torch.testing.assert_close(positions, own)
    if name == "prefix":
        assert int(whole.positions_RL.max()) == int(own.max())  # a tree may be longer than the model's positions
    # Each trained token is in one part, at the column that predicts it.
    found = {
        (int(s), int(k)): (int(r), int(c) + i * width, int(t), cuts.tolist())
        for i, part in enumerate(parts)
        for s, k, r, c, t, cuts in zip(
            part.sequence_N, part.slot_N, part.rows_N, part.cols_N, part.targets_N, part.cuts_N3, strict=True
        )
    }
    wanted = zip(
        layout.sequence_N, layout.slot_N, layout.rows_N, layout.cols_N, layout.targets_N, layout.cuts_N3, strict=True
    )
    assert found == {(int(s), int(k)): (int(r), int(c), int(t), u.tolist()) for s, k, r, c, t, u in wanted}
    assert sum(len(part.targets_N) for part in parts) == len(layout.targets_N)


def test_masks_are_those_of_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding sees itself, since attention over no key would give NaN. Rows of their own get masks under windows."""
    layout = layouts()["prefix"]
    length = layout.ids_RL.shape[1]
    mask = groups(monkeypatch)[0].whole(layout).dense_mask()
    torch.testing.assert_close(mask[:, :, :length, :length], layout.dense_mask())
    assert bool(mask.any(-1).all())
    assert not mask[:, :, :length, length:].any()
    rows = layouts()["padded"]
    assert groups(monkeypatch)[0].whole(rows).dense_mask() is None
    causal = groups(monkeypatch, masked=True)[0].whole(rows).dense_mask()
    length = rows.ids_RL.shape[1]
    assert torch.equal(causal[0, 0, :length, :length], torch.ones(length, length, dtype=torch.bool).tril())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"processes": 3}, "does not divide trainer.processes, which is 3"),
        ({"engine": "unsloth"}, "only trainer.engine `transformers` divides rows"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.memory\.context_parallel") as refused:
        check_trainer(with_values(TrainerConfig(), {"memory.context_parallel": 2} | settings))
    assert why in str(refused.value)


@pytest.mark.parametrize(("setting", "what"), [("context_parallel=2", "its rows"), ("sharded=true", "the model")])
def test_one_process_has_none_to_divide_a_pass_among(tmp_path: Path, setting: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"set trainer.processes, among which to divide {what}"):
        load(None, [f"run_dir={tmp_path}", f"trainer.memory.{setting}"])


@pytest.mark.parametrize(
    ("size", "model", "why"),
    [
        (6, decoder((6,)), "is 6: it has to divide the number of the trainer's processes, which is 4"),
        (4, decoder((12, 6)), "equal part of the model's 6 attention heads, so it has to be one of 1, 2, 3, 6"),
        (2, decoder((4,), "eager"), "under SDPA attention only, and the model's is `eager`; set it to 1"),
    ],
)
def test_what_can_not_be_divided_is_refused(size: int, model: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.memory\.context_parallel") as refused:
        ContextGroup(size, processes(), model, masked=False)
    assert why in str(refused.value)


def test_a_mask_that_the_model_makes_for_a_part_is_refused() -> None:
    part = torch.zeros(1, 4, 3, 8)
    module = SimpleNamespace(context_group=SimpleNamespace(size=SIZE))
    with pytest.raises(ConfigError, match="makes attention masks of its own for a part of a row"):
        context_attention(module, part, part, part, torch.ones(1, 1, 3, 3, dtype=torch.bool))


def test_an_import_changes_no_attention_of_the_process() -> None:
    """Only a model that is trained does."""
    code = (
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions\n"
        "before = functions['sdpa']\n"
        "import trainer.engine.forward\n"
        "assert functions['sdpa'] is before\n"
        "trainer.engine.forward.use_own_attention()\n"
        "assert functions['sdpa'] is trainer.engine.forward.use_own_attention.__globals__['context_attention']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
