"""Several processes, on two machines, take the same step as one; on CPU, over gloo. The machines are network
namespaces."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio.to_thread
import psutil
import pytest
import torch

from pipeline.config import Config, NatsConfig, save
from pipeline.events import unpack_seqs
from pipeline.log.broker import Broker
from tests.compose_box import Network
from tests.conftest import NatsServer
from tests.trainer.kit import MODEL, checkpoints, make_model, publish_group, settings, steps_reach, with_many_loras
from tests.trainer.parallel_child import FEW, FIRST, SETTINGS, engine_of, limited, step_without_room, steps
from trainer import service
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.tensors import state_of

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]

Weights = dict[str, torch.Tensor]


@pytest.fixture
def machines() -> Iterator[Network]:
    try:
        network = Network(["one", "two"])
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine makes no network namespaces: {error}")
    yield network
    network.close()


@contextmanager
def torchruns(machines: Network, *module: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """torchrun on both machines, with a process on each; they are killed at the end if they still run."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        "test",
        "--rdzv-endpoint",
        f"{machines.addresses['one']}:29400",
    ]
    with ExitStack() as stack:
        processes = []
        for name, address in machines.addresses.items():
            # No name of these machines resolves: torchrun and gloo would find their addresses by it.
            host = ["--local-addr", address, "--rdzv-conf", f"is_host={int(name == 'one')}"]
            argv = [*machines.enter(name), *command, *host, "-m", *module]
            process = subprocess.Popen(argv, env=os.environ | {"GLOO_SOCKET_IFNAME": "eth0"})
            stack.callback(end, process)
            processes.append(process)
        yield processes


def end(process: subprocess.Popen[bytes]) -> None:
    for child in [*ranks_of([process]).values(), process]:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def ranks_of(processes: list[subprocess.Popen[bytes]]) -> dict[int, psutil.Process]:
    """The trainer processes that torchrun started, by rank."""
    found = {}
    for process in (c for p in processes if p.poll() is None for c in psutil.Process(p.pid).children(True)):
        try:
            found[int(process.environ()["RANK"])] = process
        except (KeyError, psutil.NoSuchProcess):
            continue
    return found


def assert_same(mine: Weights, theirs: Weights, share: float = 1e-6) -> None:
    """To `share` of the largest value. Computed in float64: Adam's first steps are of one size however small a
    gradient is, so rounding in a gradient near 0 shows in a weight."""
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        scale = float(theirs[name].abs().max())
        torch.testing.assert_close(tensor, theirs[name], rtol=share, atol=share * scale)


@pytest.fixture(scope="module")
def ranks_of_machines() -> Iterator[subprocess.Popen[str]]:
    """The process that forks ranks: it has imported PyTorch."""
    command = [sys.executable, "-m", "tests.trainer.parallel_child"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="module")
def bases(tiny_base: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """A model for each number of processes, with as many heads. The larger one has layers with windows, and key heads
    that several of the processes need."""
    windows = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    return {2: tiny_base, 4: make_model(tmp_path_factory.mktemp("windows"), **windows)}


@pytest.fixture(scope="module")
def alone(bases: dict[int, str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, dict[str, Any]]]:
    """What comes out of one process."""
    scratch = tmp_path_factory.mktemp("alone")
    return {n: steps(engine_of(base, scratch), FEW if n == 4 else tuple(SETTINGS)) for n, base in bases.items()}


@pytest.mark.parametrize(
    ("ranks", "phases"), [(2, ["whole", "sharded", "fails", "too_large"]), (4, ["sharded"])], ids=["2", "4"]
)
def test_processes_of_two_machines_take_the_same_steps_as_one(
    machines: Network,
    ranks_of_machines: subprocess.Popen[str],
    alone: dict[int, dict[str, dict[str, Any]]],
    bases: dict[int, str],
    tmp_path: Path,
    ranks: int,
    phases: list[str],
) -> None:
    assert ranks_of_machines.stdin is not None
    assert ranks_of_machines.stdout is not None
    spaces = [machines.space(name) for name in machines.addresses for _ in range(ranks // 2)]
    line = [bases[ranks], str(tmp_path / "out"), machines.addresses["one"], ",".join(spaces), *phases]
    print(*line, file=ranks_of_machines.stdin, flush=True)
    assert ranks_of_machines.stdout.readline().split() == ["0"] * ranks
    found = torch.load(tmp_path / "out", weights_only=False)
    under = {"fails": [FIRST], "sharded": list(FEW)}
    for phase in set(phases) - {"too_large"}:
        assert list(found[phase]) == under.get(phase, list(SETTINGS))
        for name, several in found[phase].items():
            one = alone[ranks][name]
            assert_same(several["gradients"], one["gradients"])
            assert_same(several["weights"], one["weights"])
            for metric in ("loss", "grad_norm", "tokens", "sequences", "ratio_max", "kl_sampler", "staleness_max"):
                assert several["metrics"][metric] == pytest.approx(one["metrics"][metric], rel=1e-6, abs=1e-9), metric
    assert found["share"] <= 1 / ranks + 0.02
    if "fails" in phases:
        # Memory ran out once: both processes go on with gradient checkpointing, and passes stay as large.
        assert found["fails"][FIRST]["first"]["token_budget"] == 150
        with limited():
            without_room = step_without_room(engine_of(bases[ranks], tmp_path))
        assert len(without_room["dropped"]) == 1
        assert found["too_large"]["dropped"] == without_room["dropped"]
        assert_same(found["too_large"]["weights"], without_room["weights"])
        for metric in ("sequences_dropped", "tokens_dropped", "sequences", "tokens"):
            assert found["too_large"]["metrics"][metric] == without_room["metrics"][metric], metric


STEPS = 4


@pytest.mark.usefixtures("quick_redelivery")
async def test_a_sharded_trainer_goes_on_with_its_optimizer_whichever_process_dies(
    machines: Network, start_nats: Callable[..., NatsServer], tiny_base: str, tmp_path: Path
) -> None:
    """First as `journeywork up` starts it, then on two machines. The steps are those of one undisturbed process."""

    def configure(name: str, url: str, **trainer: object) -> Config:
        changed: dict[str, object] = {"dtype": "float64", "optimizer.learning_rate": 1e-4, "max_staleness": 100}
        config = settings(
            tiny_base, tmp_path / name, NatsConfig(url=url), max_steps=STEPS, groups_per_step=1, **changed | trainer
        )
        return with_many_loras(config)

    async def publish(broker: Broker, *numbers: int) -> None:
        for i in numbers:
            await publish_group(broker, f"g{i}", [0.0, 1.0, 0.5], seed=i)

    server = start_nats(extra="host: 0.0.0.0")
    gateway = re.sub(r"\d+$", "1", machines.addresses["one"])
    file = tmp_path / "config.toml"
    config = configure("several", server.url, processes=2, **{"memory.sharded": True})
    save(config, file)
    async with Broker.connect(config.nats) as broker:
        await publish(broker, 0, 1)  # it can't be at the end before it is killed
        reading, writing = os.pipe()
        up = subprocess.Popen(
            [sys.executable, "-m", "trainer", "--config", str(file), "--ready-fd", str(writing)], pass_fds=[writing]
        )
        os.close(writing)
        try:
            assert b"ready" in await anyio.to_thread.run_sync(os.read, reading, 1000)
            await steps_reach(broker, 1)
            ranks_of([up])[1].kill()
            assert await anyio.to_thread.run_sync(up.wait, 60) != 0
        finally:
            os.close(reading)
            end(up)
        arguments = ["--config", str(file), "--set", f'nats.url="nats://{gateway}:{server.port}"']
        done = len(await checkpoints(broker))
        await publish(broker, 2)
        with torchruns(machines, "trainer", *arguments) as processes:
            await steps_reach(broker, done + 1)
            ranks_of(processes)[0].kill()
            assert 0 not in [await anyio.to_thread.run_sync(p.wait, 60) for p in processes]
        await publish(broker, 3)
        with torchruns(machines, "trainer", *arguments) as processes:
            published = await steps_reach(broker, STEPS)
            for process in ranks_of(processes).values():
                process.send_signal(signal.SIGTERM)  # as torchrun does; only rank 0 heeds it, and ends the others
            assert [await anyio.to_thread.run_sync(p.wait, 60) for p in processes] == [0, 0]
    assert [e.step for e in published] == list(range(1, STEPS + 1))
    trained = [seq for e in published for seq in unpack_seqs(e.group_seqs).tolist()]
    assert len(trained) == len(set(trained)) == STEPS
    other = configure("alone", start_nats().url)
    async with Broker.connect(other.nats) as broker:
        await publish(broker, *range(STEPS))
    with anyio.fail_after(200):
        await service.train(other, lambda **_: None)
    several, one = (state_of(STEPS, Checkpoints.of(c, MODEL).read(STEPS)[1]) for c in (config, other))
    assert_same(several.weights, one.weights, share=1e-5)
    moments: list[list[Weights]] = [list((s.optimizer or {})["state"].values()) for s in (several, one)]
    for mine, theirs in zip(*moments, strict=True):
        assert_same(mine, theirs, share=1e-5)
