"""Connections to a NATS server with authentication: TLS with a CA, nkeys."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from pipeline.config import ConfigError, NatsConfig, load
from pipeline.log.broker import Broker, BrokerUnavailableError
from pipeline.security import nkey, users
from tests.kits.waiting import until_true


class Authority:
    """A certificate authority made for a test by openssl: `ca.pem`, and certificates that it signs."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.ca = folder, str(folder / "ca.pem")
        self._make("ca", "keyUsage=critical,keyCertSign")

    def issue(self, name: str) -> tuple[str, str]:
        """Return the files of a certificate for 127.0.0.1 and of its key."""
        signed = ("-CA", self.ca, "-CAkey", str(self.folder / "ca.key"))
        usage = ("basicConstraints=critical,CA:FALSE", "keyUsage=critical,digitalSignature")
        self._make(name, *usage, "subjectAltName=IP:127.0.0.1", more=signed)
        return str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key")

    def _make(self, name: str, *extensions: str, more: tuple[str, ...] = ()) -> None:
        files = ("-keyout", str(self.folder / f"{name}.key"), "-out", str(self.folder / f"{name}.pem"))
        argv = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        argv += ["-subj", f"/CN={name}", "-days", "1", *files, *more]
        subprocess.run([*argv, *(part for e in extensions for part in ("-addext", e))], check=True, capture_output=True)


async def works(config: NatsConfig, **settings: Any) -> bool:
    """Whether a connection with these settings can use the log. Raises what is not a clear refusal."""
    config = msgspec.structs.replace(config, **settings)
    try:
        async with Broker.connect(config) as broker:
            return (await broker.js.stream_info("DEAD")).config.name == "DEAD"
    except BrokerUnavailableError as error:
        if "nats.tls_ca" not in str(error):
            raise
        return False


async def test_tls_with_a_ca_of_ones_own(start_nats: Callable[..., Any], tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other")
    cert, key = authority.issue("server")
    server = start_nats(extra=f'tls {{ cert_file: "{cert}", key_file: "{key}" }}')
    config = NatsConfig(url=server.url)
    assert await works(config, tls_ca=authority.ca)
    assert not await works(config, tls_ca=other.ca)
    tls_url = server.url.replace("nats://", "tls://")
    assert not await works(msgspec.structs.replace(config, url=tls_url))  # the system's CAs do not know it
    with pytest.raises(ConfigError, match=r"nats\.tls_ca: nothing\.pem cannot be used"):
        await works(config, tls_ca="nothing.pem")


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
    server = start_nats(extra=f'tls {{ cert_file: "{cert}", key_file: "{key}" }}\n{users.authorization(keys)}')
    config = NatsConfig(url=server.url, users=str(keys), tls_ca=authority.ca)
    async with Broker.connect(config, name="supervisor") as broker:
        server.kill()
        await anyio.to_thread.run_sync(server.start)
        await until_true(lambda: broker.client.is_connected)
        assert (await broker.js.stream_info("DEAD")).config.name == "DEAD"


async def test_one_nkey_for_every_process(start_nats: Callable[..., Any], tmp_path: Path) -> None:
    pair = nkey.load_or_make(tmp_path / "all.nk")
    server = start_nats(extra=f"authorization {{ users = [ {{ nkey: {pair.public} }} ] }}")
    nkey.load_or_make(tmp_path / "other.nk")
    config = NatsConfig(url=server.url)
    assert await works(config, nkey_seed=str(tmp_path / "all.nk"))
    assert not await works(config, nkey_seed=str(tmp_path / "other.nk"))
    assert not await works(config)


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
        "teacher.url=https://name:hunter2@host/v1",
        "store.s3_endpoint=https://name:hunter2@host",
        'vllm.args=["--api-key", "hunter2"]',
        'vllm.args=["--api-key=hunter2"]',
        'vllm.args=["--api_key", "hunter2"]',
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
