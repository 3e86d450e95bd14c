"""One trainer in several processes, on one machine or several: they share the passes of a batch and sum their
gradients, and one of them commits.

    torchrun --nproc-per-node 4 -m trainer --config runs/x/config.toml               # or trainer.processes = 4
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m trainer --config runs/x/config.toml                                       # on each of two machines

The process of rank 0 is the trainer service. The others hold the same models, whole or a share of them
(`trainer.engine.sharding`), and do the jobs that it sends (`worker_loop`). A step's loss is the sum of its passes'
losses, so the step's gradient is the sum of their gradients, however the passes are distributed. torchrun's environment
variables are hidden from accelerate and TRL. Otherwise these would expect equal shares of a batch in all processes and
wait for each other within a pass.

An error in one process is raised in all before gradients are exchanged, so no process waits for one that failed.
If one runs out of memory, all halve their budgets. Processes that share the model wait for each other within a pass:
there, an error ends the process. If a process dies, the connections of the others break, torchrun ends all of them, and
the supervisor restarts the trainer.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist

from pipeline.config import TrainerConfig
from pipeline.telemetry.logs import get_logger
from trainer.batches.examples import Example
from trainer.batches.packing import MicroBatch, Packing
from trainer.engine.fitting import PassTooLargeError, is_out_of_memory
from trainer.engine.state import Weights

logger = get_logger("trainer.engine.parallel")

T = TypeVar("T")

_OF_TORCHRUN = {f"{of}{what}" for of in ("", "LOCAL_", "GROUP_", "ROLE_") for what in ("RANK", "WORLD_SIZE")}
_OF_TORCHRUN |= {"ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}
"""Environment variables of the processes that torchrun starts."""
_CPU = torch.device("cpu")
_JOB_TIMEOUT = timedelta(days=365)
"""How long a worker waits for the next job. It comes only when enough groups were scored, so the limit is generous."""


class WorkerError(RuntimeError):
    """Another process could not do its part of the step."""


Work = Literal["gradients", "logprobs", "base_logprobs", "teacher_logprobs"]
"""What is computed: gradients of the loss, logprobs under the adapter or under the base model, or what the teacher
says."""


@dataclass(frozen=True, eq=False)
class Job:
    """Work that rank 0 distributes to all processes."""

    engine: int
    """The engine to compute with, by its number (`trainer.learner.make_engines`)."""
    config: TrainerConfig
    weights: Weights
    """The adapter to compute with."""
    examples: Sequence[Example]
    group_of: Sequence[int]
    budget: int
    """The token budget of a pass."""
    packing: Packing
    work: Work
    checkpointing: bool
    """Whether gradient checkpointing is on in the first process."""


class ProcessGroup:
    """The connections of one of the trainer's processes to the others."""

    def __init__(self, rank: int, size: int, local_rank: int = 0) -> None:
        """`rank`: this process's number among all `size` processes; `local_rank`: among those of its machine."""
        self.rank, self.size, self._local_rank = rank, size, local_rank
        local_ranks: list[int] = [0] * size
        dist.all_gather_object(local_ranks, local_rank)
        self._turns = max(local_ranks) + 1
        """Number of processes on the machine that has most."""

    @classmethod
    def join(cls) -> ProcessGroup:
        """Connect to the other processes that torchrun started."""
        local_rank = int(os.environ["LOCAL_RANK"])
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if torch.cuda.device_count():
            # One device for each process. This must be set before CUDA is initialised.
            devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
            os.environ["CUDA_VISIBLE_DEVICES"] = devices[local_rank % len(devices)]
        # Jobs are sent over gloo, because NCCL keeps the GPU busy while it waits.
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=_JOB_TIMEOUT)
        for name in [n for n in os.environ if n in _OF_TORCHRUN or n.startswith("TORCHELASTIC_")]:
            del os.environ[name]
        rank = dist.get_rank()
        if rank:
            # Only rank 0 handles a stop signal, because it may have to finish a commit. It then ends the workers.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return cls(rank, dist.get_world_size(), local_rank)

    def close(self, status: int) -> NoReturn:
        """Close the connections and end this process. The interpreter is not finalized: gloo's threads may still live,
        and one that asks for the interpreter's lock then aborts the process."""
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(status)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Let the processes of a machine run the block one after the other. All processes must call this."""
        for turn in range(self._turns):
            if turn == self._local_rank:
                yield
            dist.barrier()

    # -- jobs ----------------------------------------------------------------------------------------------------

    def send(self, job: Job | None) -> None:
        """Send a job to all other processes. `None` ends their loops."""
        dist.broadcast_object_list([job], src=0, device=_CPU)

    def worker_loop(self, do: Callable[[Job], None]) -> None:
        """Call `do` with each job that rank 0 sends, until it sends `None`."""
        while True:
            received: list[Job | None] = [None]
            dist.broadcast_object_list(received, src=0, device=_CPU)
            if received[0] is None:
                return
            do(received[0])

    # -- a step --------------------------------------------------------------------------------------------------

    def partition(self, batches: Sequence[MicroBatch], *, even: bool) -> list[MicroBatch]:
        """Return the passes of `batches` that this process makes. All processes compute the same division, in which
        large passes are assigned first. `even`: all processes make equally many passes; those with fewer repeat the
        smallest one, as a filler whose results do not count."""
        load = [0.0] * self.size
        parts: list[list[MicroBatch]] = [[] for _ in load]
        for batch in sorted(batches, key=_size, reverse=True):
            rank = load.index(min(load))
            load[rank] += _size(batch)
            parts[rank].append(batch)
        own = parts[self.rank]
        if even:
            filler = replace(min(batches, key=_size), is_filler=True)
            own += [filler] * (max(map(len, parts)) - len(own))
        return own

    def all_reduce(self, work: Callable[[], T], parameters: Sequence[torch.nn.Parameter], *, together: bool) -> list[T]:
        """Do `work` in every process and sum the gradients of `parameters`. Returns the results by rank. `together`:
        the processes wait for each other within `work`, so that an error in it has to end this one.

        Raises the error of `work`, `PassTooLargeError` or `torch.OutOfMemoryError` where another process ran out of
        memory, and `WorkerError`."""
        failure: Exception | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - any error must reach the other processes
            if together:
                _exit(error)
            failure = error
        out_of_memory = failure is not None and is_out_of_memory(failure)
        too_large = failure if isinstance(failure, PassTooLargeError) else None
        message = "" if failure is None else f"{type(failure).__name__}: {failure}"
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, (result, out_of_memory, too_large, message))
        if failure is not None:
            raise failure
        for _, _, too_large, _ in outcomes:
            if too_large is not None:
                raise too_large
        if any(out_of_memory for _, out_of_memory, _, _ in outcomes):
            raise torch.OutOfMemoryError("another process of the trainer ran out of memory")
        if failures := [f"process {rank}: {message}" for rank, (*_, message) in enumerate(outcomes) if message]:
            raise WorkerError("; ".join(failures)[:2000])
        if parameters:
            self._sum(parameters)
        return [result for result, _, _, _ in outcomes]

    @staticmethod
    def _sum(parameters: Sequence[torch.nn.Parameter]) -> None:
        """Replace the gradients by their sums over all processes, computed in float32 at least. They are joined into
        one vector, so that there is one transfer."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([g.to(torch.promote_types(g.dtype, torch.float32)).reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)


def _size(batch: MicroBatch) -> float:
    """Return the tokens of a pass, padding included, by which passes are distributed."""
    return float(batch.layout.ids_RL.numel())


def _exit(error: Exception) -> NoReturn:
    """Log the error and end this process at once. The other processes wait for it within a pass; they fail when their
    connections to it break."""
    logger.error(
        "the trainer ends: a pass that all processes make together failed in this one. After a start in which memory "
        "ran out, passes have half as many tokens",
        exc=error,
    )
    os._exit(1)


def launch(processes: int, arguments: list[str]) -> NoReturn:
    """Replace this process by torchrun with `processes` trainer processes on this machine."""
    if "--ready-fd" in arguments:
        # torchrun's processes inherit the standard streams and no other descriptor.
        at = arguments.index("--ready-fd") + 1
        os.dup2(int(arguments[at]), 0)
        arguments[at] = "0"
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {processes} -m trainer".split()
    # No shell, and the command is built here.
    os.execv(sys.executable, [sys.executable, *torchrun, *arguments])  # noqa: S606
