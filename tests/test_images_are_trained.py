"""Images from a client through the gateway and real vLLM to the trainer: they are recorded whole, the trainer computes
the logprobs that vLLM sampled with, and a task that only the image answers is learned."""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForImageTextToText, AutoTokenizer

from journeywork import Journeywork
from pipeline.images import media_of
from tests.kits.installation import started
from tests.kits.vision import (
    END_OF_TURN,
    IMAGE,
    VOCABULARY,
    data_url,
    make_vision_model,
    picture,
    torchvision,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("vllm of images"),
]

_COLORS = {"r": (255, 0, 0), "g": (0, 255, 0), "b": (0, 0, 255)}
_SIZES = ((56, 56), (84, 56))
_GROUPS, _ATTEMPTS = 6, 8
_MOST_ROUNDS, _LEARNED = 60, 0.85


def _base(folder: Path) -> str:
    """A model that answers with one of three letters, whatever the image shows."""
    base = make_vision_model(folder)
    model = AutoModelForImageTextToText.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    asked = [{"role": "user", "content": "which color?"}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    rows = torch.tensor([[*ids, VOCABULARY[letter], VOCABULARY[END_OF_TURN]] for letter in _COLORS])
    labels = rows.clone()
    labels[:, : len(ids)] = -100
    optimizer = torch.optim.AdamW(model.model.language_model.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=rows, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(base)
    return base


def _play(journeywork: Journeywork, group: str, letter: str, size: tuple[int, int]) -> float:
    """One attempt: name the color of a picture. Returns the reward."""
    with (
        journeywork.trajectory("seer", group=group, group_size=_ATTEMPTS) as run,
        OpenAI(**run.openai) as client,
    ):
        image = {"type": "image_url", "image_url": {"url": data_url(picture(_COLORS[letter], *size))}}
        asked: Any = [{"role": "user", "content": [{"type": "text", "text": "which color?"}, image]}]
        answer = client.chat.completions.create(model="seer", max_tokens=2, messages=asked)
        run.reward = float(answer.choices[0].message.content == letter)
        return run.reward


def test_a_model_learns_from_images(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = (
        "models.0.name=seer", f"models.0.base={_base(tmp_path / 'base')}", f"trainer.groups_per_step={_GROUPS}",
        "trainer.lora.rank=8", "vllm.max_lora_rank=8", "vllm.max_model_len=256", "gateway.port=0",
        "trainer.optimizer.learning_rate=2e-2", "trainer.logprob_bound=1e-4",
        f"vllm.args={json.dumps(['--limit-mm-per-prompt', json.dumps({'image': 2, 'video': 0})])}",
    )  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(torchvision())}
    rng = random.Random(0)
    rounds: list[float] = []
    with started(tmp_path, run_dir, "--run-dir", str(run_dir), settings=settings, env=env, seconds=300) as up:
        with Journeywork(up.url) as journeywork, ThreadPoolExecutor(_ATTEMPTS) as pool:
            while len(rounds) < _MOST_ROUNDS and sum(rounds[-3:]) < 3 * _LEARNED:
                rewards: list[float] = []
                for number in range(_GROUPS):
                    task = f"{len(rounds)}-{number}", rng.choice([*_COLORS]), rng.choice(_SIZES)
                    rewards += pool.map(lambda _, task=task: _play(journeywork, *task), range(_ATTEMPTS))
                rounds.append(sum(rewards) / len(rewards))
        up.stop()
        calls = up.query("SELECT request, prompt_ids FROM exchanges")
        steps = up.query("SELECT metrics['on_policy_logprob_diff_max'] AS difference FROM checkpoints")
    assert sum(rounds[:2]) / 2 < 0.6
    assert sum(rounds[-3:]) / 3 >= _LEARNED, rounds
    differences = [step["difference"] for step in steps if step["difference"] is not None]
    assert len(differences) > 3
    assert max(differences) < 1e-4
    for call in calls:
        (image,) = media_of(call["request"].encode()).images
        assert image in {picture(color, *size) for color in _COLORS.values() for size in _SIZES}
        assert call["prompt_ids"].count(VOCABULARY[IMAGE]) in (4, 6)
