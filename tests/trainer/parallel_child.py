"""Several trainer processes on several machines, which are network namespaces. They are forked from one.

Reads one line per run from standard input, `BASE OUT ADDRESS NAMESPACE,… PHASE…`, starts a process in each of the
namespaces with the environment that torchrun gives it, the first one at ADDRESS, and answers with their exit codes. In
each phase the first process takes steps and the others take part in them; what came out is written to OUT.

| phase | what happens |
| --- | --- |
| `whole` | steps under several settings; each process holds the whole model |
| `sharded` | the same under a few of them with the model divided among the processes |
| `fails` | as `whole`, under the first settings; the second process runs out of memory in the first step |
| `too_large` | no process holds a pass with the first sequence |
"""

import ctypes
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from pipeline.telemetry import logs
from tests.kits.settings import with_values
from tests.trainer.kit import backward, exactly, settings, tree_of_conversations
from trainer.batches.examples import Example
from trainer.batches.packing import MicroBatch
from trainer.engine.engine import Engine
from trainer.engine.parallel import ProcessGroup
from trainer.engine.passes import Passes

SETTINGS: dict[str, dict[str, Any]] = {
    "dapo": {"memory.packing": "prefix", "memory.tokens_per_batch": 150},
    "grpo": {"memory.packing": "padded", "memory.tokens_per_batch": 40, "loss.entropy_coef": 0.05},
    "bnpo": {"memory.packing": "padded", "loss.beta": 0.1},
    "dr_grpo": {"memory.packing": "padded", "memory.tokens_per_batch": 1},
    "cispo": {"loss.kl_penalty": 0.1},
    "sft": {"memory.tokens_per_batch": 30},
    "dapo, taught": {
        "memory.packing": "prefix",
        "distill.weight": 0.5,
        "distill.divergence": "reverse_kl",
        "distill.top_k": 4,
    },
    "dapo, four updates": {"memory.packing": "padded", "optimizer.epochs": 2, "optimizer.minibatches": 2},
}
"""By loss type, one with a teacher, and one with more updates."""
FIRST = next(iter(SETTINGS))
FEW = (FIRST, "grpo", "dapo, taught", "dapo, four updates")
"""For a divided model: it gives the losses the same logprobs, so those that a pass computes in another way."""
FAST: dict[str, Any] = {"check_share": 1.0, "optimizer.learning_rate": 1e-4, "dtype": "float64"}


def examples_and_groups() -> tuple[list[Example], list[int]]:
    sequences, groups = tree_of_conversations(3)
    advantages = torch.linspace(-1.0, 1.5, len(sequences)).tolist()
    return [Example(s, a) for s, a in zip(sequences, advantages, strict=True)], groups


def steps(engine: Engine, names: Sequence[str] = tuple(SETTINGS)) -> dict[str, dict[str, Any]]:
    """Gradients of a step under each of the settings; weights and metrics after two."""
    examples, groups = examples_and_groups()
    config, state, out, untaught = engine.config, engine.initial_state(), {}, examples
    for name in names:
        changed = SETTINGS[name]
        engine.configure(with_values(config, {"loss.type": name.partition(",")[0], **changed}))
        # Whatever the steps before it left, `taught` asks the same policy.
        engine.model.load_adapter(state.weights)
        examples = taught(engine, untaught, groups) if engine.config.distill.weight else untaught
        first = engine.step(state, examples, groups)
        engine.model.load_adapter(first.state.weights)
        engine.model.peft.zero_grad(set_to_none=True)
        backward(engine, examples, groups, 1)
        gradients = {str(i): p.grad.clone() for i, p in enumerate(engine.model.parameters)}
        second = engine.step(first.state, examples[3:], groups[3:])
        out[name] = {
            "gradients": gradients,
            "weights": second.state.weights,
            "metrics": second.metrics,
            "first": first.metrics,
        }
    return out


def taught(engine: Engine, examples: Sequence[Example], groups: Sequence[int]) -> list[Example]:
    """The examples, with what the policy says of them the other way round: it would learn nothing from itself."""
    teacher_logprobs = engine.passes.teacher_logprobs(examples, groups)
    flipped = [
        replace(teacher_logprobs[i], top_logprobs_kK=np.flip(teacher_logprobs[i].top_logprobs_kK, 1).copy())
        for i in range(len(examples))
    ]
    return [replace(e, teacher=teacher_logprobs) for e, teacher_logprobs in zip(examples, flipped, strict=True)]


@contextmanager
def limited() -> Iterator[None]:
    """Memory does not hold a pass with the first sequence."""
    original = Passes._backward
    large = examples_and_groups()[0][0].sequence.ids

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
    result = engine.step(engine.initial_state(), *examples_and_groups())
    return {
        "weights": result.state.weights,
        "metrics": result.metrics,
        "dropped": [s.ids.tolist() for s in result.dropped],
    }


@contextmanager
def failing_once() -> Iterator[None]:
    original = Passes.own_gradients

    def gradients(self: Passes, *args: Any) -> Any:
        Passes.own_gradients = original  # type: ignore[method-assign]
        raise torch.OutOfMemoryError("no room, says the test")

    Passes.own_gradients = gradients  # type: ignore[method-assign]
    yield


def engine_of(base: str, scratch: Path, process_group: ProcessGroup | None = None, **changed: Any) -> Engine:
    config = settings(base, scratch, **(FAST | changed)).trainer
    return exactly(Engine(base, config, process_group))


def share(engine: Engine) -> float:
    """This process's share of the bytes of the base model's weights."""
    base = [p for n, p in engine.model.peft.named_parameters() if "lora_" not in n]
    local: int = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in base)
    return float(local / sum(p.numel() for p in base))


PHASES: dict[str, tuple[Callable[[Engine], Any], Callable[[int], AbstractContextManager[None]]]] = {
    "whole": (steps, lambda _: nullcontext()),
    "sharded": (lambda engine: steps(engine, FEW), lambda _: nullcontext()),
    "fails": (lambda engine: steps(engine, [FIRST]), lambda rank: failing_once() if rank == 1 else nullcontext()),
    "too_large": (step_without_room, lambda _: limited()),
}


def main() -> None:
    logs.configure("trainer", "ERROR")
    for line in sys.stdin:
        base, out, address, namespaces, *phases = line.split()
        machines = namespaces.split(",")
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
        ranks = [fork(base, Path(out), machines, rank, phases) for rank in range(len(machines))]
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        print(*codes, flush=True)  # noqa: T201 - the answer


def fork(base: str, out: Path, machines: Sequence[str], rank: int, phases: Sequence[str]) -> int:
    """Start the process of a rank and return its id."""
    if pid := os.fork():
        return pid
    try:
        with Path("/run/netns", machines[rank]).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"can't enter the network namespace {machines[rank]}")
        local_rank = machines[:rank].count(machines[rank])
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(machines)), "LOCAL_RANK": str(local_rank)}
        run(base, out, phases)
    except BaseException:  # noqa: BLE001 - a forked child must never return into the parent's loop
        traceback.print_exc()
    os._exit(1)


def run(base: str, out: Path, phases: Sequence[str]) -> None:
    found: dict[str, Any] = {}
    process_group = ProcessGroup.join()
    torch.set_num_threads(1)
    for phase in phases:
        found |= take_part(phase, base, out.parent, process_group)
    if process_group.rank == 0:
        torch.save(found, out)
    process_group.close(0)


def take_part(phase: str, base: str, scratch: Path, process_group: ProcessGroup) -> dict[str, Any]:
    work, around = PHASES[phase]
    engine = engine_of(base, scratch, process_group, **{"memory.sharded": phase == "sharded"})
    with around(process_group.rank):
        if process_group.rank:
            process_group.worker_loop(lambda job: engine.passes.take_part(job))
            return {}
        result = work(engine)
        process_group.send(None)
        return {phase: result, **({"share": share(engine)} if engine.model.sharded else {})}


if __name__ == "__main__":
    main()
