"""Alarms to a webhook: posted, repeated, and harmless when nobody answers."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anyio
import msgspec
import pytest

from pipeline.config import AlarmsConfig, Config, ConfigError, NatsConfig, load
from pipeline.events import AlarmChanged
from pipeline.log.broker import Broker
from pipeline.running import environment
from store.alarms import webhook
from store.alarms.webhook import Webhook, message, webhook_url
from tests.store.alarms.kit import changes, letters
from tests.store.kit import StoreProcess, publish, until_acked

pytestmark = pytest.mark.anyio

RAISED = AlarmChanged(
    project="p", alarm="kl_rise", state="raised", model="m", value=9.0, threshold=2.0, detail="the KL is 9", since=5
)  # fmt: skip


class Receiver:
    """An HTTP server that answers posts with the statuses it is given, then 200."""

    def __init__(self, *statuses: int) -> None:
        self.posts: list[dict[str, object]] = []
        waiting = list(statuses)
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.posts.append(json.loads(body))
                self.send_response(waiting.pop(0) if waiting else 200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    one = Receiver(500, 503)
    yield one
    one.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "_PAUSES_S", (0.01, 0.01))


def settings(url: str) -> Config:
    return Config(run_dir="/secret/place/demo", alarms=AlarmsConfig(webhook=url))


async def test_a_post_is_repeated_until_it_is_taken(receiver: Receiver) -> None:
    config = settings(receiver.url)
    async with anyio.create_task_group() as tg:
        Webhook(config, tg).send(RAISED)
    first, second, third = receiver.posts
    assert first == second == third == message(config, RAISED)
    assert third["text"] == "raised: Rise of KL of m: the KL is 9"
    assert "/secret" not in json.dumps(third)
    assert third["run"] == "demo"
    assert (
        message(config, msgspec.structs.replace(RAISED, value=math.nan))["value"] is None
    )  # JSON has no NaN


async def test_a_dead_webhook_disturbs_nothing(nats_config: NatsConfig, running_store: StoreProcess) -> None:
    receiver = Receiver()
    receiver.close()  # nothing listens at its address now
    often = AlarmsConfig(every_s=0.1, webhook=receiver.url)
    async with Broker.connect(nats_config) as broker, running_store(often):
        await publish(broker, letters(1))
        assert [e.alarm for e in await changes(broker, 1)] == ["dead_letters"]
        await publish(broker, letters(1, consumer="trainer"))
        await changes(broker, 2)
        await until_acked(broker)


def test_a_secret_of_the_address_stays_out_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings("https://example.com/${HOOK}")
    assert environment.environment_of(config, "store", {"HOOK": "s3cret", "OTHER": "x"}) == {"HOOK": "s3cret"}
    assert environment.environment_of(config, "gateway", {"HOOK": "s3cret"}) == {}
    with pytest.raises(ConfigError, match="HOOK is not set"):
        webhook_url(config)
    monkeypatch.setenv("HOOK", "s3cret")
    assert webhook_url(config) == "https://example.com/s3cret"
    assert "s3cret" not in json.dumps(message(config, RAISED))


@pytest.mark.parametrize("url", ["ftp://x/", "example.com/hook", "http:///x"])
def test_an_address_that_cannot_be_posted_to_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"alarms\.webhook"):
        webhook_url(settings(url))


def test_a_password_in_the_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="variable") as refused:
        load(None, ["alarms.webhook=https://me:pw@example.com/"])
    assert "pw@" not in str(refused.value)
