"""`journeywork prepare`: make keys and settings of a run, for installations that `journeywork up` does not start
(containers).

    journeywork prepare --config /etc/journeywork.toml

Makes the missing secrets under `<run_dir>/keys`: a seed for each NATS user, the trainer's signing key, the
inference server's API key and, where the settings name no key for the gateway, an operator's key (`operator.key`).
Then writes `<run_dir>/config.toml`, the settings with which every process starts. It may run again: existing
secrets stay.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from pathlib import Path

from pipeline.config import Config, ConfigError, KeyConfig, load, save
from pipeline.config.checks import check
from pipeline.files import write_once
from pipeline.running import folder_lock
from pipeline.running.resolved import max_groups_ahead
from pipeline.security import nkey, signing, users
from pipeline.terminal.parsers import add_overrides, command_parser, exit_on_error


def prepare(config: Config) -> Config:
    """Make the secrets of `config`'s run directory, write its `config.toml`, and return what that holds.

    Raises `ConfigError` where the settings do not say under which addresses the servers are reached, where the file of
    a secret is empty, and where `journeywork up` runs in the run directory."""
    if not config.nats.url or not config.vllm.urls:
        raise ConfigError("nats.url and vllm.urls: set both: the prepared processes find each other by them")
    run_dir = Path(config.run_dir)
    folder_lock.make_private(run_dir)
    with os.fdopen(folder_lock.lock_shared(run_dir)):  # the lock ends when its file is closed
        return _prepare(config, run_dir.absolute() / "keys")


def _prepare(config: Config, keys: Path) -> Config:
    """Make the secrets that are missing, by default in the folder `keys`. Put their paths, the operator's digest
    and the trainer's public key into the settings, save these as `config.toml` and return them.

    `signing.trusting_own_key` makes the signing key, whose path is set here. The services get one NATS user each, and
    only the operator's may create streams: `journeywork provision` does so, hence `nats.provision` is off for them."""
    keys.mkdir(exist_ok=True, mode=0o700)
    nats, gateway = config.nats, config.gateway
    if not (nats.users or nats.nkey_seed):
        nats = nats.replace(users=str(keys), provision=False)
    if nats.users:
        for user in users.USERS:
            nkey.load_or_make(users.seed_file(Path(nats.users), user.name))
    api_key = config.vllm.api_key_file or str(keys / "vllm.key")
    write_once(Path(api_key), lambda: f"sk-{secrets.token_urlsafe(32)}".encode())
    accepted = gateway.keys
    if not accepted:
        operator = keys / "operator.key"
        write_once(operator, lambda: f"jw-{secrets.token_urlsafe(32)}".encode())
        digest = hashlib.sha256(operator.read_bytes().strip()).hexdigest()
        accepted = (KeyConfig(sha256=digest, name="operator", role="operator"),)
    seed = config.signing.seed or str(keys / "checkpoints.nk")
    prepared = config.replace(
        nats=nats,
        vllm=config.vllm.replace(api_key_file=api_key),
        gateway=gateway.replace(keys=accepted, max_groups_ahead=max_groups_ahead(config)),
        signing=signing.trusting_own_key(config.signing.replace(seed=seed)),
    )
    check(prepared)
    save(prepared, prepared.path("config.toml"))
    return prepared


def main() -> None:
    """Run the command. Exits 0, or 2 if the settings can't be used."""
    parser = command_parser("prepare", __doc__)
    parser.add_argument("--config", required=True, help="settings, TOML")
    add_overrides(parser)
    args = parser.parse_args()
    os.umask(0o077)
    with exit_on_error("prepare", (ConfigError,)):
        config = prepare(load(args.config, args.overrides))
    sys.stdout.write(f"prepared {config.run_dir}\n")


if __name__ == "__main__":
    main()
