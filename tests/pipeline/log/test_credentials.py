"""Connections to a NATS server with authentication: TLS with a CA and client certificates, nkeys, credentials files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from pipeline.config import ConfigError, NatsConfig, load
from pipeline.log.broker import Broker, BrokerUnavailableError
from pipeline.log.credentials import options
from pipeline.running.plan import make_plan
from pipeline.running.supervisor import Supervisor
from pipeline.security import nkey, users
from tests.pipeline.certificates import Authority
from tests.pipeline.jwts import decentralised

pytestmark = pytest.mark.anyio


async def works(config: NatsConfig, **settings: Any) -> bool:
    """Whether a connection with these settings can use the log. Raises what is not a clear refusal."""
    config = msgspec.structs.replace(config, **settings)
    try:
        async with Broker.connect(config) as broker:
            return (await broker.js.stream_info("DEAD")).config.name == "DEAD"
    except BrokerUnavailableError as error:
        if "nats.tls_*" not in str(error):
            raise
        return False


async def test_tls_with_a_client_certificate(start_nats: Callable[..., Any], tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other")
    cert, key = authority.issue("server")
    server = start_nats(
        extra=f'tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{authority.ca}", verify: true }}'
    )
    client, client_key = authority.issue("client")
    stranger, stranger_key = other.issue("client")
    config = NatsConfig(url=server.url)
    assert await works(config, tls_ca=authority.ca, tls_cert=client, tls_key=client_key)
    assert not await works(config, tls_ca=authority.ca)
    assert not await works(config, tls_ca=other.ca, tls_cert=client, tls_key=client_key)
    assert not await works(config, tls_ca=authority.ca, tls_cert=stranger, tls_key=stranger_key)
    tls_url = server.url.replace("nats://", "tls://")
    assert not await works(msgspec.structs.replace(config, url=tls_url))  # the system's CAs do not know it


async def test_the_server_of_up_takes_tls_only_where_it_has_a_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    cert, key = authority.issue("server")
    client, client_key = authority.issue("client")
    settings = {
        "run_dir": tmp_path, "nats.server_cert": cert, "nats.server_key": key, "nats.tls_ca": authority.ca,
        "nats.tls_cert": client, "nats.tls_key": client_key, "vllm.urls": '["http://127.0.0.1:9"]',
    }  # fmt: skip
    config, (nats, *_) = make_plan(load(None, [f"{k}={v}" for k, v in settings.items()]), ("store",))
    assert config.nats.url.startswith("tls://127.0.0.1:")
    supervisor = Supervisor(config, [nats])
    async with anyio.create_task_group() as tg:
        await tg.start(supervisor.run)  # which provisions, over TLS
        async with Broker.connect(config.nats, name="store") as broker:
            assert (await broker.js.stream_info("DEAD")).config.name == "DEAD"
        plain = msgspec.structs.replace(
            config.nats, url=config.nats.url.replace("tls://", "nats://"), tls_cert="", tls_key=""
        )
        assert not await works(plain, tls_ca="")
        assert not await works(plain)
        supervisor.stop()


async def test_nothing_is_sent_in_the_clear_where_tls_is_set(nats_config: NatsConfig, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    assert not await works(nats_config, tls_ca=authority.ca)
    tls_url = nats_config.url.replace("nats://", "tls://")
    assert not await works(msgspec.structs.replace(nats_config, url=tls_url))


async def test_a_connection_that_loses_its_server_comes_back_with_its_credentials(
    start_nats: Callable[..., Any], tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "ca")
    cert, key = authority.issue("server")
    keys = tmp_path / "keys"
    server = start_nats(
        extra=f'tls {{ cert_file: "{cert}", key_file: "{key}" }}\n{users.authorization(keys)}'
    )
    config = NatsConfig(url=server.url, users=str(keys), tls_ca=authority.ca)
    async with Broker.connect(config, name="supervisor") as broker:
        server.kill()
        await anyio.to_thread.run_sync(server.start)
        with anyio.fail_after(20):
            while not broker.client.is_connected:
                await anyio.sleep(0.05)
            assert (await broker.js.stream_info("DEAD")).config.name == "DEAD"


async def test_one_nkey_for_every_process(start_nats: Callable[..., Any], tmp_path: Path) -> None:
    pair = nkey.load_or_make(tmp_path / "all.nk")
    server = start_nats(extra=f"authorization {{ users = [ {{ nkey: {pair.public} }} ] }}")
    nkey.load_or_make(tmp_path / "other.nk")
    config = NatsConfig(url=server.url)
    assert await works(config, nkey_seed=str(tmp_path / "all.nk"))
    assert not await works(config, nkey_seed=str(tmp_path / "other.nk"))
    assert not await works(config)


async def test_a_credentials_file(start_nats: Callable[..., Any], tmp_path: Path) -> None:
    extra, file = decentralised(tmp_path)
    (tmp_path / "other").mkdir()
    _, other = decentralised(tmp_path / "other")
    config = NatsConfig(url=start_nats(extra=extra).url)
    assert await works(config, credentials=str(file))
    assert not await works(config, credentials=str(other))
    assert not await works(config)


def test_a_credentials_file_is_checked_before_it_is_used(tmp_path: Path) -> None:
    file = tmp_path / "user.creds"
    config = NatsConfig(url="nats://127.0.0.1:1", credentials=str(file))
    with pytest.raises(ConfigError, match=r"nats\.credentials: .*user\.creds cannot be read"):
        options(config, "judge")
    file.write_text("secret word")
    with pytest.raises(ConfigError, match="no credentials file") as caught:
        options(config, "judge")
    assert "secret word" not in str(caught.value)
    file.write_text("-----BEGIN NATS USER JWT-----\n")
    assert options(config, "judge")["user_credentials"] == str(file)


def test_what_is_no_seed_is_named_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "judge.nk"
    with pytest.raises(ConfigError, match=r"judge\.nk"):
        nkey.load(file)
    seed = nkey.new_seed()
    file.write_bytes(seed[:-8])
    with pytest.raises(ConfigError, match="holds no nkey seed") as caught:
        nkey.load(file)
    assert seed[:-8].decode() not in str(caught.value)


@pytest.mark.parametrize(
    "setting",
    [
        "nats.url=nats://name:hunter2@host:4222",
        "nats.url=nats://hunter2@host:4222",
        "nats.url=nats://a:4222,nats://name:hunter2@b:4222",
        "nats.url=name:hunter2@host",
        'vllm.urls=["http://name:hunter2@host/v1"]',
        "judge.api_base=https://name:hunter2@host/v1",
        "store.s3_endpoint=https://name:hunter2@host",
        'vllm.args=["--api-key", "hunter2"]',
        'vllm.args=["--api-key=hunter2"]',
        "vllm.env.HF_TOKEN=hunter2",
    ],
)
def test_a_secret_in_an_address_is_refused_without_showing_it(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.partition("=")[0].replace(".", r"\.")) as caught:
        load(None, [setting])
    assert "hunter2" not in str(caught.value)
    assert load(None, ["judge.api_base=https://host/v1/user@domain"])  # only what comes before the path


async def test_an_address_given_to_a_command_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"nats\.url") as caught:
        async with Broker.connect(NatsConfig(url="nats://name:hunter2@127.0.0.1:1")):
            pass
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["nats.users=a", "nats.nkey_seed=b"], "users and nkey_seed"),
        (["nats.nkey_seed=a", "nats.credentials=b"], "nkey_seed and credentials"),
        (["nats.tls_key=a"], "tls_cert"),
        (["environment.gatway=[]"], "gatway"),
    ],
)
def test_settings_that_contradict_each_other_are_named(settings: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(None, settings)
