"""Data-parallel steps: the processes share the passes of a batch and sum their gradients, and one process commits.

    accelerate launch --num_processes 4 -m trainer --config runs/x/config.toml     # or trainer.processes = 4

The process of rank 0 is the trainer service. The others hold the same models and do the jobs that it sends
(`worker_loop`). A step's loss is the sum of its passes' losses, so the step's gradient is the sum of their gradients,
however the passes are distributed. The launcher's environment variables are hidden from accelerate and TRL.
Otherwise these would expect equal shares of a batch in all processes and wait for each other within a pass.

An error in one process is raised in all before gradients are exchanged, so no process waits for one that failed.
If one runs out of memory, all halve their budgets. If a process dies, the connections of the others break, the
launcher ends all of them, and the supervisor restarts the trainer."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from pipeline.config import TrainerConfig
from pipeline.telemetry.logs import get_logger
from trainer.batches.groups import Example
from trainer.batches.packing import MicroBatch
from trainer.engine.budget import PassTooLargeError, is_out_of_memory
from trainer.engine.state import Weights

log = get_logger("trainer.engine.parallel")

T = TypeVar("T")

LAUNCHER = "JOURNEYMAN_LAUNCHER"
"""Environment variable with the process id of the launcher, which has the supervisor's file descriptors."""
_PATIENCE = timedelta(days=365)
"""Timeout of a worker's wait for the next job, which comes only when there are groups."""


class WorkerError(RuntimeError):
    """Another process could not do its part of the step."""


@dataclass(frozen=True, eq=False)
class Job:
    """Work that rank 0 distributes to all processes."""

    engine: int
    """`Engine.number`."""
    config: TrainerConfig
    weights: Weights
    """The adapter to compute with."""
    examples: Sequence[Example]
    groups: Sequence[int]
    budget: int
    """Tokens of a pass."""
    gradients: bool
    """Whether gradients of the loss are wanted; else logprobs."""


class ProcessGroup:
    """The processes of this trainer, as seen from one of them."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        # Orders travel over gloo: NCCL would keep the GPU busy while it waits.
        self._control: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)

    @classmethod
    def join(cls) -> ProcessGroup:
        """Connect to the other processes of the launcher, with the addresses in its environment variables."""
        names = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
        )
        found = {name: os.environ.pop(name) for name in names if name in os.environ}
        # torchrun, which accelerate starts, keeps the store in which processes meet; without it the first process does.
        agents_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        for name in [n for n in os.environ if n.startswith(("ACCELERATE_", "TORCHELASTIC_"))]:
            del os.environ[name]
        rank, size = int(found["RANK"]), int(found["WORLD_SIZE"])
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if torch.cuda.device_count():
            # One device each, before anything touches CUDA: to every process its own is the first.
            devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
            os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(found.get("LOCAL_RANK", "0")) % len(devices)]
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=dist.TCPStore(
                found["MASTER_ADDR"],
                int(found["MASTER_PORT"]),
                size,
                is_master=not agents_store and rank == 0,
                timeout=timedelta(minutes=5),
            ),
            rank=rank,
            world_size=size,
            timeout=_PATIENCE,
        )
        if rank:
            # A stop is for the first process, which may want to finish a step.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return cls(rank, size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and join gloo's threads. Every process must call it before the interpreter exits: a
        gloo thread that releases a tensor asks for the interpreter's lock, and one that asks during finalization
        aborts the process with "terminate called without an active exception"."""
        self._control = None  # the threads of a group end with its last reference
        dist.destroy_process_group()

    # -- orders --------------------------------------------------------------------------------------------------

    def send(self, job: Job | None) -> None:
        """Send a job to all other processes. `None` ends their loops."""
        dist.broadcast_object_list([job], src=0, group=self._control)

    def receive(self) -> Job | None:
        box: list[Job | None] = [None]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def worker_loop(self, do: Callable[[Job], None]) -> None:
        """Do the jobs that rank 0 sends until it sends `None`."""
        while (job := self.receive()) is not None:
            do(job)

    # -- a step --------------------------------------------------------------------------------------------------

    def partition(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """This process's passes. All processes compute the same division. Large passes are assigned first."""
        load = [0.0] * self.size
        mine = []
        for batch in sorted(batches, key=_size, reverse=True):
            rank = load.index(min(load))
            load[rank] += _size(batch)
            if rank == self.rank:
                mine.append(batch)
        return mine

    def all_reduce(self, work: Callable[[], T], parameters: Sequence[torch.nn.Parameter]) -> list[T]:
        """Do `work` in every process and sum the gradients of `parameters`. Returns the results by rank.

        Raises the error of `work`, `PassTooLargeError` or `torch.OutOfMemoryError` where another process ran out of
        memory, and `WorkerError`."""
        failure: Exception | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - the others have to know, whatever it was
            failure = error
        memory = failure is not None and is_out_of_memory(failure)
        too_large = failure if isinstance(failure, PassTooLargeError) else None
        said = "" if failure is None else f"{type(failure).__name__}: {failure}"
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, (result, memory, too_large, said), group=self._control)
        if failure is not None:
            raise failure
        for _, _, theirs, _ in outcomes:
            if theirs is not None:
                raise theirs
        if any(out_of_memory for _, out_of_memory, _, _ in outcomes):
            raise torch.OutOfMemoryError("another process of the trainer ran out of memory")
        if others := [f"process {rank}: {said}" for rank, (_, _, _, said) in enumerate(outcomes) if said]:
            raise WorkerError("; ".join(others)[:2000])
        if parameters:
            self._sum(parameters)
        return [result for result, _, _, _ in outcomes]

    @staticmethod
    def _sum(parameters: Sequence[torch.nn.Parameter]) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([g.to(torch.promote_types(g.dtype, torch.float32)).reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)


def _size(batch: MicroBatch) -> float:
    return float(batch.layout.ids_RL.numel())


def launch(processes: int, arguments: Sequence[str]) -> None:
    """Become `accelerate launch` with so many processes of the trainer. Does not return."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    os.environ[LAUNCHER] = str(os.getpid())
    # As for several GPUs on a machine without any too: the processes see for themselves what there is.
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes),
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(port),
        "--module", "trainer", *arguments,
    ]  # fmt: skip
    os.execv(sys.executable, command)  # noqa: S606 - that is what it is to become


def adopt_ready_fd(arguments: list[str]) -> list[str]:
    """`arguments` with the launcher's `--ready-fd` opened in this process, since child processes do not inherit it."""
    launcher = os.environ.pop(LAUNCHER, "")
    if not launcher or "--ready-fd" not in arguments:
        return arguments
    place = arguments.index("--ready-fd") + 1
    opened = os.open(f"/proc/{launcher}/fd/{arguments[place]}", os.O_WRONLY)
    return [*arguments[:place], str(opened), *arguments[place + 1 :]]
