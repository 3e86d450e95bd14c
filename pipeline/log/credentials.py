"""Authentication of a connection to NATS: nkeys, a private inbox, TLS.

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


class EncryptedClient(FastClient):
    """A client that refuses an unencrypted connection. nats-py itself goes on without TLS if the server does not
    require it."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Overrides nats-py's method, which handles the server's first message: end the connection if it does not
        require TLS."""
        if initial_connection and not info.get("tls_required"):
            raise nats.errors.Error("the server does not require TLS, but the settings do")
        await super()._process_info(info, initial_connection)


def uses_tls(config: NatsConfig) -> bool:
    """Return whether the settings ask for TLS, by a file of certificates or by an address."""
    return bool(config.tls_ca) or "tls://" in config.address


def make_client(config: NatsConfig) -> FastClient:
    """Return a client that is not connected yet."""
    return EncryptedClient() if uses_tls(config) else FastClient()


def options(config: NatsConfig, name: str) -> dict[str, Any]:
    """Return the arguments of nats-py's `connect` for authentication and TLS of the connection called `name`, which
    decides its NATS user. Raises `ConfigError` for an address with a password, and files that can't be used."""
    if any(map(names_user, config.servers)):
        raise ConfigError(
            "nats.url: an address must not hold a user name, password or token; use nats.users or nats.nkey_seed"
        )
    arguments: dict[str, Any] = {}
    seed = config.nkey_seed
    if config.users:
        user = users.user(name).name
        seed = str(users.seed_file(Path(config.users), user))
        arguments["inbox_prefix"] = users.inbox_prefix(user)
    if seed:
        nkey.load(seed)  # checked here: nats-py would print the content of a file that is no seed
        arguments["nkeys_seed"] = seed
    if uses_tls(config):
        try:
            arguments["tls"] = ssl.create_default_context(cafile=config.tls_ca or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"nats.tls_ca: {config.tls_ca} cannot be used: {error.strerror or error}") from error
    return arguments


def is_authentication_error(error: Exception) -> bool:
    """Return whether a connection failed on authentication or TLS, so that another attempt cannot succeed."""
    text = str(error).lower()
    return isinstance(error, ssl.SSLError) or "authorization violation" in text or "tls" in text


def is_permission_error(error: Exception) -> bool:
    """Return whether the server refused a publish or subscription because the user lacks the right."""
    return "permissions violation" in str(error).lower()
