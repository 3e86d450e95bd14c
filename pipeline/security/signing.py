"""Signatures of checkpoints: the trainer signs the event, and the event names the SHA-256 of the archive.

The signing key is an nkey of its own, not the trainer's NATS user: a NATS client signs whatever text a server sends it to log
in with, so a server could have had a checkpoint signed.

Errors: `ConfigError` for keys that can't be used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pipeline.config import Config, ConfigError, SigningConfig
from pipeline.events import CheckpointPublished
from pipeline.security import nkey

_DOMAIN = b"journeyman.checkpoint.1\n"


def _defaults() -> dict[str, Any]:
    """Field to default value, of the fields that have one and the same each time."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(CheckpointPublished):
        if field.default is not msgspec.NODEFAULT:
            found[field.name] = msgspec.to_builtins(field.default)
        elif field.default_factory is dict:
            found[field.name] = {}
    return found


_DEFAULTS = _defaults()


def signed_bytes(event: CheckpointPublished) -> bytes:
    """Return what a signature of `event` covers: every field but the signature, as JSON with sorted names.

    A field that has its default value is left out, so that an event from before a field was added keeps its signature."""
    fields = msgspec.to_builtins(event)
    kept = {
        name: value
        for name, value in fields.items()
        if name not in ("signature", "signer") and (name not in _DEFAULTS or value != _DEFAULTS[name])
    }
    return _DOMAIN + msgspec.json.encode(kept, order="sorted")


class Signer:
    """Signs with the seed that `signing.seed` names."""

    def __init__(self, pair: nkey.KeyPair) -> None:
        self._pair = pair

    @classmethod
    def of(cls, config: Config) -> Signer | None:
        """Return the signer of these settings, or None if they name no seed."""
        return cls(nkey.load(config.signing.seed)) if config.signing.seed else None

    def sign(self, event: CheckpointPublished) -> CheckpointPublished:
        """Return `event` with its signature; the same event always gets the same one."""
        signature = self._pair.sign(signed_bytes(event))
        return msgspec.structs.replace(event, signature=signature, signer=self._pair.public)


class Trust:
    """Whose checkpoints may be served and trained on."""

    def __init__(self, config: SigningConfig) -> None:
        for key in config.keys:
            try:
                nkey.check_public(key)
            except ValueError as error:
                raise ConfigError(f"signing.keys: {error}; never put a seed there") from error
        self._keys = frozenset(config.keys)
        if config.check == "require" and not self._keys:
            raise ConfigError(
                'signing.check is "require", but signing.keys is empty: name the trainer\'s public key'
            )
        self.checks = bool(self._keys) and config.check != "off"

    def objection(self, event: CheckpointPublished) -> str:
        """Return why `event` must not be used; empty if it may be."""
        if not self.checks:
            return ""
        if not event.signature:
            return (
                f"the checkpoint {event.version} is not signed; for a run from before checkpoints were signed, set "
                'signing.check = "off"'
            )
        if event.signer not in self._keys:
            return f"the checkpoint {event.version} is signed by {event.signer[:60]}, which signing.keys does not name"
        if not nkey.verified(event.signer, signed_bytes(event), event.signature):
            return f"the signature of the checkpoint {event.version} does not match its content"
        return ""


def provided(config: Config) -> Config:
    """Return `config` with the signing seed made where its file does not exist, and its public key among `signing.keys`."""
    signing = config.signing
    if not signing.seed:
        return config
    public = nkey.load_or_make(Path(signing.seed)).public
    if public in signing.keys:
        return config
    keys = (*signing.keys, public)
    return msgspec.structs.replace(config, signing=msgspec.structs.replace(signing, keys=keys))
