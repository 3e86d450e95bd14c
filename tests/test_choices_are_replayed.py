"""Router replay from the gateway to a step: `journeywork up` before a server that returns the experts of a mixture of
experts as vLLM does.

vLLM's CPU build can't return them, because its Model Runner V2 needs Triton. The double writes the field as vLLM's
source does: with whole answers, not with streamed ones."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from journeywork import Journeywork
from tests.conftest import InferenceDouble, VllmServer
from tests.kits.inference_double import choices_of
from tests.kits.installation import SMALL, started
from tests.trainer.families import make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LAYERS, EXPERTS, K = 2, 4, 2


@pytest.fixture
def double(tmp_path: Path) -> Any:
    """A server of a tiny mixture of experts with the tokenizer of the demo's model."""
    folder = tmp_path / "base"
    vocabulary = json.loads((VllmServer.base / "config.json").read_text())["vocab_size"]
    make("qwen3_moe", folder, vocab_size=vocabulary)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(VllmServer.base / name, folder)
    server = InferenceDouble(tmp_path, args=("--routed", str(LAYERS), str(EXPERTS), str(K)))
    server.base = folder
    server.start()
    yield server
    server.stop()


def test_a_step_trains_with_the_choices_that_were_recorded(double: InferenceDouble, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = (
        *SMALL, f"models.0.name={double.model}", f"models.0.base={double.base}", "trainer.groups_per_step=1",
        "trainer.router_replay=true", "trainer.lora.experts=true",
    )  # fmt: skip
    answers = []
    flags = ("--run-dir", str(run_dir), "--vllm-url", double.url)
    with started(tmp_path, run_dir, *flags, settings=settings) as up:
        with Journeywork(up.url) as journeywork:
            for attempt in range(2):
                with (
                    journeywork.trajectory(double.model, group="g", group_size=2) as run,
                    OpenAI(**run.openai) as client,
                ):
                    for streamed in (False, True):
                        asked: Any = [{"role": "user", "content": f"a{attempt}=x {streamed}?"}]
                        call = {"model": double.model, "max_tokens": 6, "messages": asked, "stream": streamed}
                        answer = client.chat.completions.create(**call)
                        answers.append(answer.model_dump_json() if not streamed else [c.id for c in answer])
                    run.reward = float(attempt)
        up.until_step(1)
        calls = up.query(
            "SELECT streamed, prompt_ids, sampled_ids, hex(experts) AS chosen FROM rollout_exchange ORDER BY started_at"
        )
        (step,) = up.query(
            "SELECT metrics['tokens_replayed'] AS replayed, metrics['tokens'] AS tokens FROM checkpoints WHERE step = 1"
        )
    assert not any("routed_experts" in answer for answer in answers)
    assert [call["streamed"] for call in calls] == [False, True, False, True]
    for call in calls:
        if call["streamed"]:
            assert not call["chosen"]  # its tokens go where the trainer's routers send them
            continue
        array = np.load(io.BytesIO(bytes.fromhex(call["chosen"])))
        assert array.dtype == np.uint8
        np.testing.assert_array_equal(
            array, choices_of(call["prompt_ids"] + call["sampled_ids"], LAYERS, EXPERTS, K)
        )
    assert step["replayed"] == sum(len(call["sampled_ids"]) for call in calls if not call["streamed"])
    assert step["tokens"] == sum(len(call["sampled_ids"]) for call in calls)
