"""Signatures of checkpoints: the trainer signs the event, which contains the SHA-256 of the adapter's archive.

The signing key is a separate nkey, not that of the trainer's NATS user. A NATS client signs any text that a server
sends as a login challenge, so a malicious server could obtain the signature of a checkpoint.

Errors: `ConfigError` for keys that cannot be used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pipeline.config import Config, ConfigError, SigningConfig
from pipeline.events import CheckpointPublished
from pipeline.security import nkey

_DOMAIN = b"journeywork.checkpoint.1\n"


def _constant_defaults() -> dict[str, Any]:
    """Return the default of each field that has the same one each time, which that of `at` is not.

    Such a default must never change: signatures of events that leave it out would no longer match."""
    defaults: dict[str, Any] = {}
    for field in msgspec.structs.fields(CheckpointPublished):
        if field.default is not msgspec.NODEFAULT:
            defaults[field.name] = msgspec.to_builtins(field.default)
        elif field.default_factory is dict:
            defaults[field.name] = {}
    return defaults


_DEFAULTS = _constant_defaults()


def signed_bytes(event: CheckpointPublished) -> bytes:
    """Return the bytes that a signature of `event` covers: every field except `signature` and `signer`, as JSON with
    sorted names.

    A field with its default value is left out, so that the signature of an event from before the field was added
    stays valid."""
    fields = msgspec.to_builtins(event)
    signed = {
        name: value
        for name, value in fields.items()
        if name not in ("signature", "signer") and (name not in _DEFAULTS or value != _DEFAULTS[name])
    }
    return _DOMAIN + msgspec.json.encode(signed, order="sorted")


class Signer:
    """Signs checkpoints with the seed in the file `signing.seed`."""

    def __init__(self, pair: nkey.KeyPair) -> None:
        self._pair = pair

    @classmethod
    def from_config(cls, config: Config) -> Signer | None:
        """Return the signer of these settings, or None if they name no seed."""
        return cls(nkey.load(config.signing.seed)) if config.signing.seed else None

    def sign(self, event: CheckpointPublished) -> CheckpointPublished:
        """Return `event` with its signature, which is the same each time."""
        signature = self._pair.sign(signed_bytes(event))
        return msgspec.structs.replace(event, signature=signature, signer=self._pair.public)


class Trust:
    """Decides whether a checkpoint may be served and trained on, by its signature."""

    def __init__(self, config: SigningConfig) -> None:
        for key in config.keys:
            try:
                nkey.public_bytes(key)
            except ValueError as error:
                raise ConfigError(f"signing.keys: {error}; put no seed there") from error
        self._keys = frozenset(config.keys)
        if config.check == "require" and not self._keys:
            raise ConfigError('signing.check is "require", but signing.keys is empty: name the trainer\'s public key')
        self.is_enforced = bool(self._keys) and config.check != "off"
        """Whether a checkpoint needs the signature of one of `signing.keys`."""

    def objection(self, event: CheckpointPublished) -> str:
        """Return why `event` must not be used; an empty text if it may."""
        if not self.is_enforced:
            return ""
        if not event.signature:
            return (
                f"the checkpoint {event.version} is not signed; for a run from before checkpoints were signed, set "
                'signing.check = "off"'
            )
        if event.signer not in self._keys:
            return f"the checkpoint {event.version} is signed by {event.signer[:60]}, which is not among signing.keys"
        if not nkey.verify(event.signer, signed_bytes(event), event.signature):
            return f"the signature of the checkpoint {event.version} does not match its content"
        return ""


def trusting_own_key(signing: SigningConfig) -> SigningConfig:
    """Return `[signing]` with the public key of `signing.seed` among `signing.keys`, so that an installation trusts the
    checkpoints of its own trainer without an entry by hand. Unchanged if no seed is set. `journeywork up` and `prepare`
    call it before anything starts.

    Creates the seed's file if it does not exist. Raises `ConfigError`."""
    if not signing.seed:
        return signing
    public = nkey.load_or_make(Path(signing.seed)).public
    return signing if public in signing.keys else signing.replace(keys=(*signing.keys, public))
