"""Processes that hang are detected and restarted: services, servers, and a log whose disk was full."""

import os
import shutil
import signal
import sys
from pathlib import Path

import anyio
import msgspec
import pytest

from pipeline import streams
from pipeline.config import Config, NatsConfig, SupervisorConfig, load
from pipeline.errors import BrokerError, BrokerUnavailableError
from pipeline.events import TrajectoryOpened
from pipeline.log.broker import Broker
from pipeline.log.health import Fill
from pipeline.log.health import fills as log_fills
from pipeline.running import liveness
from pipeline.running.plan import ProcessSpec, make_plan
from tests.conftest import NatsServer, free_port
from tests.kits.disk import small_disk
from tests.kits.events import opened
from tests.pipeline.running.supervised import supervised

pytestmark = pytest.mark.timeout(300)

SERVICE = """
import anyio
from pipeline.running.service import main
async def serve(config, ready):
    ready()
    await anyio.sleep_forever()
main("judge", serve)
"""

HEALTH = """
import http.server, pathlib, sys
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if pathlib.Path(sys.argv[2]).exists() else 200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Page).serve_forever()
"""

QUICK = SupervisorConfig(deadline_s=3.0, probe_every_s=0.2)


def settings(run_dir: Path) -> Config:
    config = load(None, [f"run_dir={run_dir}"])
    return msgspec.structs.replace(config, supervisor=QUICK)


def large(name: str, size: int) -> TrajectoryOpened:
    return opened(name, task=os.urandom(size // 2).hex())


async def test_a_stopped_service_is_noticed_and_restarted(tmp_path: Path) -> None:
    argv = (sys.executable, "-c", SERVICE, "--config", str(tmp_path / "config.toml"))
    spec = ProcessSpec("judge", argv, start_timeout_s=60)
    async with supervised(settings(tmp_path), spec) as (supervisor, changes):
        judge = supervisor.watched["judge"]
        os.kill(judge.pid, signal.SIGSTOP)
        await changes.until(lambda: judge.restarts and judge.state == "ready")


async def test_a_server_whose_health_page_fails_is_restarted(tmp_path: Path) -> None:
    flag, port = tmp_path / "sick", free_port()
    argv = (sys.executable, "-c", HEALTH, str(port), str(flag))
    spec = ProcessSpec("vllm", argv, probe=f"http://127.0.0.1:{port}/health")
    async with supervised(settings(tmp_path), spec) as (supervisor, changes):
        server = supervisor.watched["vllm"]
        first = server.pid
        flag.touch()
        await changes.until(lambda: server.pid != first)
        flag.unlink()
        await changes.until(lambda: server.restarts and server.state == "ready")


@pytest.mark.slow
async def test_a_bucket_that_met_a_full_disk_takes_objects_once_there_is_room(tmp_path: Path) -> None:
    """The probes of the streams of events fit into the space that was left, so they see nothing."""
    with small_disk(tmp_path / "small", 8) as disk:
        config, specs = make_plan(load(None, [f"run_dir={disk}", "nats.max_bytes=1000000000"]), ())
        config = msgspec.structs.replace(config, supervisor=QUICK)
        impatient = msgspec.structs.replace(config.nats, publish_deadline_s=5.0, ack_timeout_s=1.0)
        async with (
            supervised(config, *specs, seconds=250) as (supervisor, changes),
            # The trainer may write objects, the supervisor may not.
            Broker.connect(impatient, name="trainer", provision=False) as hasty,
            Broker.connect(config.nats, name="trainer", provision=False) as broker,
        ):
            server = supervisor.watched["nats"]
            (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - 600_000))
            with pytest.raises(BrokerError):
                await hasty.put_object(streams.ADAPTERS_BUCKET, "refused", os.urandom(1_500_000))
            before = server.restarts
            (disk / "ballast").unlink()
            await changes.until(lambda: server.restarts > before and server.state == "ready")
            await broker.put_object(streams.ADAPTERS_BUCKET, "taken", os.urandom(1_500_000))


async def nothing_is_lost(reason: str) -> None:
    raise AssertionError(reason)


async def test_a_stream_refuses_at_its_limit(nats_server: NatsServer) -> None:
    total = 4_000_000
    config = NatsConfig(url=nats_server.url, max_bytes=total)
    limit = streams.byte_limit(streams.stream("ROLLOUTS").share, total)
    impatient = msgspec.structs.replace(config, publish_deadline_s=1.0)
    async with Broker.connect(config) as broker, Broker.connect(impatient) as hasty:
        count = 0

        async def fills() -> Fill:
            return next(f for f in await log_fills(broker) if f.name == "ROLLOUTS")

        while (await fills()).share < 0.8:
            await broker.publish(large(f"t{count}", 100_000))
            count += 1
        assert (await fills()).bytes < limit
        while (await fills()).bytes + 101_000 < limit:
            await broker.publish(large(f"t{count}", 100_000))
            count += 1
        with pytest.raises(BrokerUnavailableError):
            await hasty.publish(large("one more", 200_000))
        first = await broker.stream_info("ROLLOUTS")
        assert first.state.first_seq == 1  # nothing that somebody may still have to read was dropped
        # What a limit below the present size would drop stays too, and so does the limit if none is given.
        for other in (1000, 0):
            async with Broker.connect(msgspec.structs.replace(config, max_bytes=other)):
                pass
        info = await broker.stream_info("ROLLOUTS")
        assert (info.state.messages, info.config.max_bytes) == (first.state.messages, first.state.bytes)


async def test_a_log_without_room_for_one_event_is_an_alarm(nats_server: NatsServer) -> None:
    config = NatsConfig(url=nats_server.url, max_bytes=10)
    async with Broker.connect(config):
        pass
    probe = liveness.LogProbe(Config(nats=config))
    async with anyio.create_task_group() as tg:
        tg.start_soon(probe.watch, nothing_is_lost)
        with anyio.fail_after(60):
            await probe.checked.wait()
        tg.cancel_scope.cancel()
    assert any(alarm.startswith("ROLLOUTS takes no events") for alarm in probe.alarms)


async def test_dead_letters_never_stop_the_rest(nats_server: NatsServer) -> None:
    config = NatsConfig(url=nats_server.url, max_bytes=1_000_000)
    async with Broker.connect(config) as broker:
        for i in range(30):
            await broker.publish_raw(f"dead.ROLLOUTS.c{i}", os.urandom(4000), {})
        info = await broker.stream_info("DEAD")
        assert 0 < info.state.messages < 30
        assert info.state.last_seq == 30


async def test_probes_are_seen_by_no_consumer(nats_server: NatsServer) -> None:
    async with Broker.connect(NatsConfig(url=nats_server.url)) as broker:
        for spec in streams.STREAMS:
            await broker.js.publish(streams.alive_subject(spec.name), b"", headers={"Nats-TTL": "1s"})
        assert await broker.lag() == 0
        assert [m async for m in broker.messages("ROLLOUTS", 1, 1)] == []
