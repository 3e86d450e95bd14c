"""The GPU proof's measurements with vLLM: agreement with the trainer's logprobs in bfloat16, and adapter swaps.

Run by `benchmarks.gpu`, in processes of their own. Both use the 0.6B shape and a real vLLM; `swaps` is
`benchmarks.gateway_swaps` with that model, through the gateway, with 256 streams."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import gpu_models
from benchmarks.gpu_machine import Partial

STREAMS = {False: 256, True: 4}
"""Number of concurrent streams, by `tiny`."""
RANK = 16


def _server_args(device: str, tiny: bool) -> list[str]:
    """Arguments that differ from those of the tests' server. Of a repeated argument, vLLM uses the last."""
    args = ["--max-model-len", "4096", "--max-lora-rank", str(RANK)]
    if device == "cuda":
        args += ["--dtype", "bfloat16", "--gpu-memory-utilization", "0.45", "--no-enforce-eager"]
    return args + ([] if tiny else ["--max-num-seqs", "256"])


async def _replies(url: str, model: str, count: int, tokens: int) -> list[dict[str, Any]]:
    import httpx

    async with httpx.AsyncClient(
        base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)
    ) as client:

        async def one(number: int) -> dict[str, Any]:
            words = " ".join(f"t{6 + (7 * number + 13 * k) % 4000}" for k in range(64))
            answer = await client.post(
                "/v1/chat/completions",
                json={
                    "model": model, "messages": [{"role": "user", "content": words}], "max_tokens": tokens,
                    "temperature": 1.0, "logprobs": True, "top_logprobs": 0, "return_token_ids": True,
                    "ignore_eos": True, "seed": number,
                },
            )  # fmt: skip
            answer.raise_for_status()
            return dict(answer.json())

        return await asyncio.gather(*(one(n) for n in range(count)))


def _example(answer: dict[str, Any], step: int, advantage: float) -> Any:
    import numpy as np

    from trainer.batches.groups import Example
    from trainer.batches.sequences import TokenSequence

    choice = answer["choices"][0]
    prompt, sampled = answer["prompt_token_ids"], choice["token_ids"]
    n = len(prompt) + len(sampled)
    trained = np.arange(n) >= len(prompt)
    logprobs = np.full(n, np.nan, np.float32)
    logprobs[trained] = [t["logprob"] for t in choice["logprobs"]["content"]]
    sequence = TokenSequence(
        "sampler", np.array([*prompt, *sampled], np.int32), trained, logprobs,
        np.where(trained, step, -1).astype(np.int32), np.ones(n, np.float32),
    )  # fmt: skip
    return Example(sequence, advantage)


def difference(into: Path, models: Path, scratch: Path, *, device: str, tiny: bool, rounds: int) -> None:
    """Sample, train a step on what was sampled, load the adapter, sample from it: the differences of every round."""
    import httpx
    import msgspec

    from pipeline.config import LoraConfig, OptimizerConfig, TrainerConfig
    from tests.conftest import VllmServer
    from trainer.checkpoints import checkpoint
    from trainer.engine.engine import Engine
    from trainer.engine.verify import logprob_bound_for

    out = Partial(into)
    base = gpu_models.make("0.6b", models / "qwen3-0.6b", tiny=tiny, device=device)
    server = VllmServer(scratch, args=_server_args(device, tiny))
    server.base = Path(base)
    server.start()
    try:
        config = TrainerConfig(
            lora=LoraConfig(rank=RANK, alpha=2.0 * RANK), optimizer=OptimizerConfig(learning_rate=1e-3)
        )
        engine = Engine(base, config, scratch)
        # What is measured must not end the measurement: the bound is reported beside it.
        engine.configure(msgspec.structs.replace(config, logprob_bound=math.inf, check_share=1.0))
        state = engine.initial_state()
        version = f"{server.model}@0"
        steps: list[dict[str, Any]] = []
        for step in range(rounds):
            count, tokens = (8, 16) if tiny else (64, 256)
            answers = asyncio.run(_replies(server.url, version, count, tokens))
            examples = [_example(a, step, 1.0 if n % 2 else -1.0) for n, a in enumerate(answers)]
            result = engine.step(state, examples, list(range(count)))
            state, found = result.state, result.metrics
            names = (
                "on_policy_logprob_diff",
                "on_policy_logprob_diff_max",
                "kl_sampler",
                "ratio_max",
                "tokens",
            )
            logprob = sum(float(e.sequence.logprobs[e.sequence.loss_mask].sum()) for e in examples)
            steps.append(
                {"version": version, "logprob_mean": logprob / found["tokens"]} | {n: found[n] for n in names}
            )
            out.put("bound", logprob_bound_for(config, engine.model.dtype))
            out.put("dtype", str(engine.model.dtype).removeprefix("torch."))
            out.put("steps", steps)
            folder = scratch / f"adapter-{step + 1}"
            folder.mkdir(parents=True)
            for name, content in checkpoint.adapter_files(state.weights, engine.model.lora, base).items():
                (folder / name).write_bytes(content)
            version = f"proof@{step + 1}"
            body = {"lora_name": version, "lora_path": str(folder)}
            httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=120).raise_for_status()
    finally:
        server.stop()


def swaps(into: Path, models: Path, scratch: Path, *, device: str, tiny: bool, rounds: int) -> None:
    """Adapters swapped under streams, through the gateway."""
    from benchmarks import gateway_swaps
    from pipeline.log.broker import Broker
    from tests.conftest import VllmServer
    from tests.rollout_gateway.conftest import standing

    out = Partial(into)
    # The server, the adapters and the gateway of the tests, with another model.
    VllmServer.base = Path(gpu_models.make("0.6b", models / "qwen3-0.6b", tiny=tiny, device=device))
    streams, count = STREAMS[tiny], 4 if tiny else 10 * rounds

    async def run(folder: Path) -> dict[str, Any]:
        args = _server_args(device, tiny)
        with standing(folder, args=args) as gateway, gateway_swaps.explained(gateway):
            async with Broker.connect(gateway.config.nats) as broker:
                found, seen = await gateway_swaps.measure(
                    gateway, broker, swaps=count, streams=streams, calm_s=4.0 if tiny else 20.0
                )
                return found | await gateway_swaps.check_labels(broker, seen, streams, weights=False)

    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        found = asyncio.run(run(Path(folder)))
    out.put("swaps", json.loads(json.dumps(found)))
