"""A file of conversations becomes one call of the backend."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import journeywork.art as art
from journeywork.art.utils.sft import create_sft_dataset_iterator, train_sft_from_file

pytestmark = pytest.mark.anyio

SAID = [{"role": "user", "content": "a1=. b1=x"}, {"role": "assistant", "content": "a1"}]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {}}}]


class Backend:
    def __init__(self) -> None:
        self.calls: list[tuple[list[Any], list[str]]] = []

    async def train_sft(self, model: Any, chats: list[Any], options: list[str]) -> None:
        self.calls.append((chats, options))


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
        model, str(path), epochs=3, batch_size=4, peak_lr=1e-3, schedule_type="cosine", warmup_ratio=0.5
    )
    ((chats, options),) = backend.calls
    assert chats == [{"messages": SAID}, {"messages": SAID, "tools": TOOLS}, {"messages": SAID}]
    assert dict(zip(options[::2], options[1::2], strict=True)) == {
        "--epochs": "3", "--batch-size": "4", "--learning-rate": "0.001", "--schedule": "cosine", "--warmup": "0.5",
    }  # fmt: skip


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
        ({"schedule_type": "steep"}, "schedule_type must be one of cosine, linear, constant, not 'steep'"),
    ],
)
async def test_an_option_out_of_range_is_refused(model: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        await train_sft_from_file(model, "none.jsonl", **options)


async def test_a_part_of_the_steps_is_refused(model: Any) -> None:
    for options in ({"initial_step": 2}, {"final_step": 0}):
        with pytest.raises(art.UnsupportedError, match="leave out initial_step and final_step"):
            await train_sft_from_file(model, "none.jsonl", **options)  # type: ignore[arg-type]
    with pytest.raises(art.UnsupportedError, match="train_sft_from_file"):
        create_sft_dataset_iterator([])
