"""A file of conversations becomes one call of the backend."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import journeywork.art as art
from journeywork.art.utils.sft import create_lr_schedule, create_sft_dataset_iterator, train_sft_from_file

pytestmark = pytest.mark.anyio

SAID = [{"role": "user", "content": "a1=. b1=x"}, {"role": "assistant", "content": "a1"}]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {}}}]


class Backend:
    def __init__(self) -> None:
        self.calls: list[tuple[list[list[Any]], list[float]]] = []

    async def train_sft(self, model: Any, batches: list[list[Any]], rates: list[float]) -> None:
        self.calls.append((batches, rates))


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def model(backend: Backend) -> Any:
    return SimpleNamespace(backend=lambda: backend)


async def test_the_conversations_of_a_file_are_trained_in_one_call(
    model: Any, backend: Backend, tmp_path: Path
) -> None:
    path = tmp_path / "chats.jsonl"
    rows = [
        {"messages": SAID, "id": 7},
        {"messages": SAID, "tools": TOOLS},
        {"messages": SAID, "tools": None},
    ]
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    await train_sft_from_file(
        model,
        str(path),
        epochs=3,
        batch_size=2,
        peak_lr=1e-3,
        schedule_type="cosine",
        warmup_ratio=0.5,
        initial_step=1,
    )
    ((batches, rates),) = backend.calls
    assert [len(batch) for batch in batches] == [1, 2, 1, 2, 1]
    assert sorted(map(json.dumps, batches[1] + batches[2])) == sorted(
        json.dumps(chat)
        for chat in ({"messages": SAID}, {"messages": SAID, "tools": TOOLS}, {"messages": SAID})
    )
    assert rates == pytest.approx([2e-3 / 3, 1e-3, 1e-3, 0.5e-3, 0.0])


def test_the_chunks_of_a_data_set_share_one_schedule() -> None:
    """As in openpipe-art 0.5.18: 7 trajectories, 4 batches an epoch, chunks of 3 batches."""
    trajectories = [art.Trajectory(messages_and_choices=SAID, reward=float(i)) for i in range(7)]
    options: dict[str, Any] = {"chunk_size": 3, "epochs": 2, "warmup_ratio": 0.25, "peak_lr": 1.0}
    chunks = list(create_sft_dataset_iterator(trajectories, **options))
    assert [(c.step, c.epoch, c.epoch_step, len(c.trajectories)) for c in chunks] == [
        (0, 0, 0, 6), (3, 0, 3, 1), (4, 1, 0, 6), (7, 1, 3, 1),
    ]  # fmt: skip
    rates = [rate for c in chunks for rate in c.config.learning_rate]  # type: ignore[union-attr]
    assert rates == pytest.approx(create_lr_schedule(8, 1.0, warmup_steps=2))
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    for epoch in (chunks[:2], chunks[2:]):
        assert sorted(t.reward for c in epoch for t in c.trajectories) == list(range(7))
    assert list(create_sft_dataset_iterator(trajectories, initial_step=5, **options)) == chunks[1:]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no conversation"),
        ("\n{", "line 2: write"),
        ("[]", "line 1: write"),
        ('{"messages": 3}', "line 1: write"),
        ('{"messages": [{"content": "x"}]}', "line 1: write"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "line 1 has no message of the assistant"),
    ],
)
async def test_a_file_that_can_not_be_trained_on_is_said_so(
    model: Any, backend: Backend, tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        await train_sft_from_file(model, str(path))
    assert backend.calls == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epochs": 0}, "epochs and batch_size must be at least 1, not 0 and 2"),
        ({"peak_lr": 0.0}, "peak_lr must be above 0"),
        ({"peak_lr": float("nan")}, "peak_lr must be above 0"),
        ({"warmup_ratio": 1.0}, "warmup_ratio from 0 to below 1"),
    ],
)
async def test_an_option_out_of_range_is_refused(model: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        await train_sft_from_file(model, "none.jsonl", **options)
