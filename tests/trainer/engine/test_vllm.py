"""The trainer against the real sampler: same tokens, same logprobs, and an adapter that really changes what is
sampled."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config, ModelConfig, OptimizerConfig, TrainerConfig
from pipeline.events import ExchangeRecorded
from tests.conftest import VllmServer
from tests.trainer import kit
from trainer.checkpoints import checkpoint
from trainer.engine.engine import Engine
from trainer.engine.state import SamplerMismatchError
from trainer.learner import Learner
from trainer.sequences import build

pytestmark = pytest.mark.vllm


def post(server: VllmServer, path: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return bytes(answer.read())


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 12},
    {"temperature": 1.1, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 30, "top_p": 0.95, "min_p": 0.01},
]
"""How the members of a group are sampled."""


def play(server: VllmServer, version: str, step: int, name: str, **sampling: float) -> list[ExchangeRecorded]:
    """Two turns of a conversation, as the gateway would record them."""
    messages: list[dict[str, str]] = []
    out = []
    for turn in range(2):
        messages.append({"role": "user", "content": f"a{turn + 1}=x b2=o move {turn}?"})
        body = {
            "model": version,
            "messages": messages,
            "max_tokens": 8,
            "logprobs": True,
            "return_token_ids": True,
            "top_logprobs": 0,
            **sampling,
        }
        answer = json.loads(post(server, "/v1/chat/completions", body))
        choice = answer["choices"][0]
        messages.append({"role": "assistant", "content": choice["message"]["content"] or ""})
        out.append(
            kit.exchange(
                name,
                turn,
                answer["prompt_token_ids"],
                choice["token_ids"],
                logprobs=[t["logprob"] for t in choice["logprobs"]["content"]],
                step=step,
                request=json.dumps(body).encode(),
                finish_reason=choice["finish_reason"],
            )
        )
    return out


def test_logprobs_agree_with_vllm_before_and_after_a_step(vllm_server: VllmServer, tmp_path: Path) -> None:
    settings = TrainerConfig(groups_per_step=1, check_share=1.0, optimizer=OptimizerConfig(learning_rate=1e-2))
    model = ModelConfig(name=kit.MODEL, base=str(vllm_server.base))
    config = Config(project="p", run_dir=str(tmp_path), models=(model,), trainer=settings)
    learner = Learner(config, model, Engine(model.base, settings))
    earlier = version = f"{vllm_server.model}@0"
    loaded = []
    try:
        for step in range(3):
            group = kit.group(f"g{step}", [0.0, 0.2, 0.9, 1.0], step=step)
            sequences = [
                s
                for i, m in enumerate(group.members)
                # From the second step on, one trajectory is of the version before.
                for old in [step > 0 and i == 0]
                for s in build(
                    m.trajectory,
                    play(vllm_server, earlier if old else version, step - old, m.trajectory, **SAMPLING[i]),
                )
            ]
            pending = learner.train_step([kit.training_group(group, sequences, step + 1)])
            learner.make_current(pending)
            metrics = pending.manifest.event.metrics
            assert metrics["on_policy_logprob_diff"] < 1e-3
            # The first step with tokens of an earlier version compares them. Whether the next one does depends on how
            # long the sampled replies are: it may save tokens for a longer sequence.
            assert step != 1 or metrics["sampler_logprob_checked"] >= 2  # a token a call at the least
            assert metrics.get("sampler_logprob_diff", 0.0) < 1e-3
            folder = tmp_path / f"adapter-{step}"
            folder.mkdir()
            for name in checkpoint.ADAPTER_FILES:
                (folder / name).write_bytes(pending.files[name])
            earlier, version = version, f"trainer-test@{step + 1}"
            post(vllm_server, "/v1/load_lora_adapter", {"lora_name": version, "lora_path": str(folder)})
            loaded.append(version)
        # The base model no longer agrees: the adapter is what vLLM sampled with.
        group = kit.group("base", [0.0, 1.0], step=3)
        sequences = [
            s
            for m in group.members
            for s in build(m.trajectory, play(vllm_server, f"{vllm_server.model}@0", 3, m.trajectory))
        ]
        with pytest.raises(SamplerMismatchError, match="step 4 is not taken"):
            learner.train_step([kit.training_group(group, sequences, 9)])
    finally:
        for name in loaded:
            post(vllm_server, "/v1/unload_lora_adapter", {"lora_name": name})
