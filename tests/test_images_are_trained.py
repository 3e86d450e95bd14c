"""Images from a client through the gateway and real vLLM to the trainer: they are recorded whole, and at each step the
trainer computes the logprobs that vLLM sampled with."""

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from openai import OpenAI

from journeywork import Journeywork
from pipeline.chat.images import media_of
from tests.kits.installation import started
from tests.kits.vision import IMAGE, QUESTION, VOCABULARY, data_url, make_guesser, picture, torchvision

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1800), pytest.mark.xdist_group("vllm of images")]

_COLORS = {"r": (255, 0, 0), "b": (0, 0, 255)}
_SIZES = ((56, 56), (84, 56))
_GROUPS, _ATTEMPTS, _STEPS = 3, 8, 2


def _play(journeywork: Journeywork, attempt: int, group: str, letter: str, size: tuple[int, int]) -> None:
    """One attempt: name the color of a picture. No two rewards of a group are equal, so that every group is trained."""
    with journeywork.trajectory("seer", group=group, group_size=_ATTEMPTS) as run, OpenAI(**run.openai) as client:
        image = {"type": "image_url", "image_url": {"url": data_url(picture(_COLORS[letter], *size))}}
        asked: Any = [{"role": "user", "content": [{"type": "text", "text": QUESTION}, image]}]
        answer = client.chat.completions.create(model="seer", max_tokens=2, messages=asked)
        run.reward = float(answer.choices[0].message.content == letter) + attempt / 100


def test_logprobs_of_answers_to_images_are_those_of_vllm_at_each_step(tmp_path: Path) -> None:
    run_dir, base = tmp_path / "run", make_guesser(tmp_path / "base", [*_COLORS])
    settings = (
        "models.0.name=seer",
        f"models.0.base={base}",
        f"trainer.groups_per_step={_GROUPS}",
        "trainer.lora.rank=8",
        "vllm.max_lora_rank=8",
        "vllm.max_model_len=256",
        "gateway.port=0",
        "trainer.optimizer.learning_rate=1e-2",
        "trainer.logprob_bound=1e-4",
        f"vllm.args={json.dumps(['--limit-mm-per-prompt', json.dumps({'image': 2, 'video': 0})])}",
    )
    env = {**os.environ, "PYTHONPATH": str(torchvision())}
    rng = random.Random(0)
    with started(tmp_path, run_dir, "--run-dir", str(run_dir), settings=settings, env=env, seconds=400) as up:
        with Journeywork(up.url) as journeywork, ThreadPoolExecutor(_ATTEMPTS) as pool:
            # A step's groups begin when the step before it is served: each step has tokens of the newest version.
            for step in range(1, _STEPS + 1):
                for _ in range(_GROUPS):
                    task = uuid4().hex, rng.choice([*_COLORS]), rng.choice(_SIZES)
                    list(pool.map(lambda i, task=task: _play(journeywork, i, *task), range(_ATTEMPTS)))
                up.until_step(step)
        up.stop()
        calls = up.query("SELECT request, prompt_ids FROM exchanges")
        steps = up.query("SELECT metrics['on_policy_logprob_diff_max'] AS difference FROM checkpoints")
    differences = [step["difference"] for step in steps if step["difference"] is not None]
    assert len(differences) == _STEPS
    assert max(differences) < 1e-4
    for call in calls:
        (image,) = media_of(call["request"].encode()).images
        assert image in {picture(color, *size) for color in _COLORS.values() for size in _SIZES}
        assert call["prompt_ids"].count(VOCABULARY[IMAGE]) in (4, 6)
