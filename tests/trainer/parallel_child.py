"""One of several trainer processes: `accelerate launch … --module tests.trainer.parallel_child BASE OUT`.

The first process takes steps under several settings and writes what came out; with `fail` the other one runs out
of memory in the middle of the first step. With `too_large` neither process holds a pass with the first sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.config import with_values
from tests.trainer.kit import backward, exactly, settings, tree_of_conversations
from trainer import learner
from trainer.batches.groups import Example
from trainer.batches.packing import MicroBatch
from trainer.engine.engine import Engine
from trainer.engine.parallel import ProcessGroup
from trainer.engine.passes import Passes

SETTINGS: list[dict[str, Any]] = [
    {"loss.type": "dapo", "memory.packing": "prefix", "memory.tokens_per_batch": 150},
    {
        "loss.type": "grpo",
        "memory.packing": "padded",
        "memory.tokens_per_batch": 40,
        "loss.entropy_coef": 0.05,
    },
    {"loss.type": "bnpo", "memory.packing": "padded", "loss.beta": 0.1},
    {"loss.type": "dr_grpo", "memory.packing": "padded", "memory.tokens_per_batch": 1},
    {"memory.packing": "padded", "optimizer.epochs": 2, "optimizer.minibatches": 2},
]


def steps(engine: Engine) -> list[dict[str, Any]]:
    """Gradients of a step under each of the settings; weights and metrics after two."""
    out = []
    sequences, groups = tree_of_conversations(3)
    advantages = torch.linspace(-1.0, 1.5, len(sequences)).tolist()
    examples = [Example(s, a) for s, a in zip(sequences, advantages, strict=True)]
    config, state = engine.config, engine.initial_state()
    for changed in SETTINGS:
        engine.configure(with_values(config, changed))
        first = engine.step(state, examples, groups)
        engine.model.load_adapter(first.state.weights)
        engine.model.peft.zero_grad(set_to_none=True)
        backward(engine, examples, groups, 1)
        gradients = {str(i): p.grad.clone() for i, p in enumerate(engine.model.parameters)}
        second = engine.step(first.state, examples[3:], groups[3:])
        out.append(
            {
                "gradients": gradients,
                "weights": second.state.weights,
                "metrics": second.metrics,
                "first": first.metrics,
            }
        )
    return out


TOO_LARGE = 0
"""Index of the sequence that `limited` has no room for."""


@contextmanager
def limited() -> Iterator[None]:
    """Memory does not hold a pass with the sequence `TOO_LARGE`."""
    original = Passes._backward
    large = tree_of_conversations(3)[0][TOO_LARGE].ids

    def backward(self: Passes, batch: MicroBatch, examples: Sequence[Example], *rest: Any) -> None:
        if any(np.array_equal(examples[i].sequence.ids, large) for i in batch.indices):
            raise torch.OutOfMemoryError("no room, says the test")
        original(self, batch, examples, *rest)

    Passes._backward = backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        Passes._backward = original  # type: ignore[method-assign]


def step_without_room(engine: Engine) -> dict[str, Any]:
    """The weights and metrics of a step of which a sequence is left out, and the trajectories of such."""
    sequences, groups = tree_of_conversations(3)
    advantages = torch.linspace(-1.0, 1.5, len(sequences)).tolist()
    examples = [Example(s, a) for s, a in zip(sequences, advantages, strict=True)]
    with limited():
        result = engine.step(engine.initial_state(), examples, groups)
    return {
        "weights": result.state.weights, "metrics": result.metrics, "dropped": [s.ids.tolist() for s in result.dropped]
    }  # fmt: skip


def main() -> None:
    base, out, *how = sys.argv[1:]
    with ProcessGroup.join() as process_group:
        _take_steps(process_group, base, Path(out), how)
    left = threads_of_gloo()
    assert not left, left


def threads_of_gloo() -> list[str]:
    """The names of this process's threads that gloo started."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if "gloo" in name]


def _take_steps(process_group: ProcessGroup, base: str, out: Path, how: list[str]) -> None:
    original = learner.make_engines

    def make_engines(*given: Any) -> Any:
        return {shape: exactly(engine) for shape, engine in original(*given).items()}

    learner.make_engines = make_engines
    config = settings(
        base, out.parent / f"run{process_group.rank}", dtype="float64", **{"optimizer.learning_rate": 1e-4}
    )
    assert threads_of_gloo()
    if process_group.rank == 0:
        (engine,) = make_engines(config, out.parent, process_group).values()
        torch.save(step_without_room(engine) if how == ["too_large"] else steps(engine), out)
        process_group.send(None)
        return
    if how == ["fail"]:
        _fail_once()
    engines = list(make_engines(config, out.parent, process_group).values())
    with limited() if how == ["too_large"] else nullcontext():
        process_group.worker_loop(lambda job: engines[job.engine].passes.take_part(job))


def _fail_once() -> None:
    original = Passes.own_gradients
    failed = False

    def gradients(self: Passes, *args: Any) -> Any:
        nonlocal failed
        if self.process_group is not None and not failed:
            failed = True
            raise torch.OutOfMemoryError("no room, says the test")
        return original(self, *args)

    Passes.own_gradients = gradients  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
