"""Data-parallel steps: the processes share the passes of a batch and sum their gradients, and one process commits.

    accelerate launch --num_processes 4 -m trainer --config runs/x/config.toml     # or trainer.processes = 4

The process of rank 0 is the trainer service. The others hold the same models and do the jobs that it sends
(`worker_loop`). A step's loss is the sum of its passes' losses, so the step's gradient is the sum of their gradients,
however the passes are distributed. The launcher's environment variables are hidden from accelerate and TRL.
Otherwise these would expect equal shares of a batch in all processes and wait for each other within a pass.

An error in one process is raised in all before gradients are exchanged, so no process waits for one that failed.
If one runs out of memory, all halve their budgets. If a process dies, the connections of the others break, the
launcher ends all of them, and the supervisor restarts the trainer.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Self, TypeVar

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

LAUNCHER = "JOURNEYWORK_LAUNCHER"
"""Environment variable with the process id of the launcher, which has the supervisor's file descriptors."""
_JOB_TIMEOUT = timedelta(days=365)
"""How long a worker waits for the next job. It comes only when enough groups were scored, so the limit is generous."""


class WorkerError(RuntimeError):
    """Another process could not do its part of the step."""


Work = Literal["gradients", "scores", "base_scores", "teachings"]
"""What is computed: gradients of the loss, logprobs under the adapter or under the base model, or what the teacher
says."""


@dataclass(frozen=True, eq=False)
class Job:
    """Work that rank 0 distributes to all processes."""

    engine: int
    """The engine to compute with: `Engine.number`."""
    config: TrainerConfig
    weights: Weights
    """The adapter to compute with."""
    examples: Sequence[Example]
    groups: Sequence[int]
    budget: int
    """The token budget of a pass."""
    work: Work


class ProcessGroup:
    """The connections of one of the trainer's processes to the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        # Jobs are sent over gloo, because NCCL keeps the GPU busy while it waits.
        self._control: Any = dist.new_group(backend="gloo", timeout=_JOB_TIMEOUT)

    @classmethod
    def join(cls) -> ProcessGroup:
        """Connect to the other processes of the launcher, with the addresses in its environment variables."""
        names = [
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
        ]
        addresses = {name: os.environ.pop(name) for name in names if name in os.environ}
        # torchrun, which accelerate starts, hosts the TCP store for the rendezvous. Without torchrun rank 0 hosts it.
        agents_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        for name in [n for n in os.environ if n.startswith(("ACCELERATE_", "TORCHELASTIC_"))]:
            del os.environ[name]
        rank, size = int(addresses["RANK"]), int(addresses["WORLD_SIZE"])
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if torch.cuda.device_count():
            # One device for each process. This must be set before CUDA is initialised.
            devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
            os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(addresses.get("LOCAL_RANK", "0")) % len(devices)]
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=dist.TCPStore(
                addresses["MASTER_ADDR"],
                int(addresses["MASTER_PORT"]),
                size,
                is_master=not agents_store and rank == 0,
                timeout=timedelta(minutes=5),
            ),
            rank=rank,
            world_size=size,
            timeout=_JOB_TIMEOUT,
        )
        if rank:
            # Only rank 0 handles a stop signal, because it may have to finish a commit. It then ends the workers.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return cls(rank, size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections and join gloo's threads. Every process must call it before the interpreter exits: a
        gloo thread that releases a tensor asks for the interpreter's lock, and one that asks during finalization
        aborts the process with "terminate called without an active exception"."""
        self._control = None  # the group's threads end when its last reference is dropped
        dist.destroy_process_group()

    # -- jobs ----------------------------------------------------------------------------------------------------

    def send(self, job: Job | None) -> None:
        """Send a job to all other processes. `None` ends their loops."""
        dist.broadcast_object_list([job], src=0, group=self._control)

    def worker_loop(self, do: Callable[[Job], None]) -> None:
        """Do the jobs that rank 0 sends until it sends `None`."""
        while True:
            received: list[Job | None] = [None]
            dist.broadcast_object_list(received, src=0, group=self._control)
            if received[0] is None:
                return
            do(received[0])

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
        except Exception as error:  # noqa: BLE001 - any error must reach the other processes
            failure = error
        out_of_memory = failure is not None and is_out_of_memory(failure)
        too_large = failure if isinstance(failure, PassTooLargeError) else None
        message = "" if failure is None else f"{type(failure).__name__}: {failure}"
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, (result, out_of_memory, too_large, message), group=self._control)
        if failure is not None:
            raise failure
        for _, _, too_large, _ in outcomes:
            if too_large is not None:
                raise too_large
        if any(out_of_memory for _, out_of_memory, _, _ in outcomes):
            raise torch.OutOfMemoryError("another process of the trainer ran out of memory")
        if failures := [
            f"process {rank}: {message}" for rank, (*_, message) in enumerate(outcomes) if message
        ]:
            raise WorkerError("; ".join(failures)[:2000])
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
    """Replace this process by `accelerate launch` with `processes` trainer processes. Does not return."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    os.environ[LAUNCHER] = str(os.getpid())
    # `--multi_gpu` starts the processes on a machine without GPUs too; `ProcessGroup.join` finds the devices.
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes),
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(port),
        "--module", "trainer", *arguments,
    ]  # fmt: skip
    os.execv(sys.executable, command)  # noqa: S606 - no shell, and the command is built here


def adopt_ready_fd(arguments: list[str]) -> list[str]:
    """`arguments` with the launcher's `--ready-fd` opened in this process, since child processes do not inherit it."""
    launcher = os.environ.pop(LAUNCHER, "")
    if not launcher or "--ready-fd" not in arguments:
        return arguments
    index = arguments.index("--ready-fd") + 1
    opened = os.open(f"/proc/{launcher}/fd/{arguments[index]}", os.O_WRONLY)
    return [*arguments[:index], str(opened), *arguments[index + 1 :]]
