"""Authentication of a connection to NATS: nkeys or a credentials file, a private inbox, TLS.

Errors: `ConfigError`, which names the setting and the file, never the content of the file.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import nats.errors

from pipeline.config import ConfigError, NatsConfig
from pipeline.config.checks import names_user
from pipeline.log.fast_client import FastClient
from pipeline.security import nkey, users

_CREDENTIALS = b"-----BEGIN NATS USER JWT-----"


class EncryptedClient(FastClient):
    """A client that refuses an unencrypted connection. nats-py itself goes on without TLS if the server does not
    require it."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and not info.get("tls_required"):
            raise nats.errors.Error("the server does not require TLS, but the settings do")
        await super()._process_info(info, initial_connection)


def inbox_prefix(config: NatsConfig, name: str) -> str:
    """Return the prefix of the inboxes of the connection called `name`."""
    if config.inbox_prefix:
        return config.inbox_prefix
    return users.inbox_prefix(users.user(name).name) if config.users else "_INBOX"


def uses_tls(config: NatsConfig) -> bool:
    return bool(config.tls_ca or config.tls_cert) or "tls://" in config.address


def make_client(config: NatsConfig) -> FastClient:
    """Return a client that is not connected yet."""
    return EncryptedClient() if uses_tls(config) else FastClient()


def options(config: NatsConfig, name: str) -> dict[str, Any]:
    """Return the arguments of nats-py's `connect` for authentication and TLS of the connection called `name`."""
    if any(map(names_user, config.servers)):
        raise ConfigError(
            "nats.url: an address must not hold a user name, password or token; use nats.credentials"
        )
    arguments: dict[str, Any] = {"inbox_prefix": inbox_prefix(config, name)}
    seed = config.nkey_seed
    if config.users:
        seed = str(users.seed_file(Path(config.users), users.user(name).name))
    if seed:
        nkey.load(seed)  # checked here: nats-py would print the content of a file that is no seed
        arguments["nkeys_seed"] = seed
    elif config.credentials:
        arguments["user_credentials"] = _credentials(config.credentials)
    if uses_tls(config):
        arguments["tls"] = tls_context(config)
    return arguments


def is_authentication_error(error: Exception) -> bool:
    """Return whether a connection failed on authentication or TLS, so that another attempt cannot succeed."""
    text = str(error).lower()
    return isinstance(error, ssl.SSLError) or "authorization violation" in text or "tls" in text


def is_permission_error(error: Exception) -> bool:
    """Return whether the server refused a publish or subscription because the user lacks the right."""
    return "permissions violation" in str(error).lower()


def tls_context(config: NatsConfig) -> ssl.SSLContext:
    """Return the TLS context: the CA of the server's certificate, and the client's certificate."""
    what = f"nats.tls_ca ({config.tls_ca})"
    try:
        context = ssl.create_default_context(cafile=config.tls_ca or None)
        if config.tls_cert:
            what = f"nats.tls_cert ({config.tls_cert}) with nats.tls_key ({config.tls_key})"
            context.load_cert_chain(config.tls_cert, config.tls_key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{what} cannot be used: {error.strerror or error}") from error
    return context


def _credentials(path: str) -> str:
    try:
        if _CREDENTIALS in Path(path).read_bytes():
            return path
    except OSError as error:
        raise ConfigError(f"nats.credentials: {path} cannot be read: {error.strerror}") from error
    raise ConfigError(f"nats.credentials: {path} is no credentials file as `nsc` writes it")
