"""`journeyman prepare`: make keys and settings of a run, for installations that `journeyman up` does not start
(containers).

    journeyman prepare --config /etc/journeyman.toml

Makes the missing secrets under `<run_dir>/keys`: a seed for each NATS user, the trainer's signing key, the
inference server's API key and, where the settings name no key for the gateway, an operator's key (`operator.key`).
Then writes `<run_dir>/config.toml`, the settings with which every process starts. It may run again: existing
secrets stay.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import sys
from pathlib import Path

import msgspec

from pipeline.config import Config, ConfigError, KeyConfig, load, save
from pipeline.running import run_lock
from pipeline.security import nkey, signing, users


def prepare(config: Config) -> Config:
    """Make the secrets of `config`'s run directory, write its `config.toml`, and return what that holds.

    Raises `ConfigError` where the settings do not say under which addresses the servers are reached, and where
    `journeyman up` runs in the run directory."""
    if not config.nats.url or not config.vllm.urls:
        raise ConfigError("nats.url and vllm.urls: set both: the prepared processes find each other by them")
    run_dir = Path(config.run_dir)
    run_lock.private(run_dir)
    lock = run_lock.share(run_dir)
    try:
        return _prepare(config, run_dir.absolute() / "keys")
    finally:
        os.close(lock)


def _prepare(config: Config, keys: Path) -> Config:
    keys.mkdir(exist_ok=True, mode=0o700)
    nats, vllm, gateway = config.nats, config.vllm, config.gateway
    if not (nats.users or nats.nkey_seed or nats.credentials):
        nats = msgspec.structs.replace(nats, users=str(keys), provision=False)
    if nats.users:
        for user in users.USERS:
            nkey.load_or_make(users.seed_file(Path(nats.users), user.name))
    if not vllm.api_key_file:
        vllm = msgspec.structs.replace(vllm, api_key_file=str(keys / "vllm.key"))
    nkey.write_secret(Path(vllm.api_key_file), lambda: f"sk-{secrets.token_urlsafe(32)}".encode())
    if not gateway.keys:
        operator = keys / "operator.key"
        nkey.write_secret(operator, lambda: f"jm-{secrets.token_urlsafe(32)}".encode())
        digest = hashlib.sha256(operator.read_bytes().strip()).hexdigest()
        gateway = msgspec.structs.replace(
            gateway, keys=(KeyConfig(sha256=digest, name="operator", role="operator"),)
        )
    if not config.signing.seed:
        config = msgspec.structs.replace(
            config, signing=msgspec.structs.replace(config.signing, seed=str(keys / "checkpoints.nk"))
        )
    config = signing.with_public_key(msgspec.structs.replace(config, nats=nats, vllm=vllm, gateway=gateway))
    save(config, config.path("config.toml"))
    return config


def main() -> None:
    """Run the command. Exits 0, or 2 if the settings can't be used."""
    parser = argparse.ArgumentParser(prog="journeyman prepare", description=__doc__)
    parser.add_argument("--config", required=True, help="settings, TOML")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", dest="overrides")
    args = parser.parse_args()
    os.umask(0o077)
    try:
        config = prepare(load(args.config, args.overrides))
    except ConfigError as error:
        sys.stderr.write(f"journeyman prepare: {error}\n")
        raise SystemExit(2) from error
    sys.stdout.write(f"prepared {config.run_dir}\n")


if __name__ == "__main__":
    main()
