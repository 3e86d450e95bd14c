"""nkeys, the Ed25519 keys of NATS: seeds in files of mode 0600, signatures and their verification.

A seed (`SU…`) is the secret, the public key (`U…`) identifies it. Both are text. No error message contains a seed.

Errors: `ConfigError`, which names the file.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from pathlib import Path

import nacl.exceptions
import nacl.signing
import nkeys

from pipeline.config import ConfigError
from pipeline.files import write_once

_PUBLIC_BYTES = 35
"""One byte for the kind of key, 32 of the key, two of the checksum."""


class KeyPair:
    """A private key, made from its seed."""

    def __init__(self, seed: bytes) -> None:
        """Raises `ValueError` if `seed` is no nkey seed."""
        try:
            pair = nkeys.from_seed(bytearray(seed))
            self.public = str(pair.public_key.decode()).rstrip("=")
        except (nkeys.NkeysError, ValueError, binascii.Error):
            raise ValueError("not an nkey seed") from None
        self._pair = pair

    def sign(self, message: bytes) -> bytes:
        """Return the 64 bytes of the signature."""
        return bytes(self._pair.sign(message))


def new_seed() -> bytes:
    """Return a fresh seed of a user key, as text."""
    return bytes(nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER))


def load(path: str | Path) -> KeyPair:
    """Return the key pair of the seed in the file `path`. Raises `ConfigError` if the file holds no readable seed."""
    try:
        return KeyPair(Path(path).read_bytes().strip())
    except OSError as error:
        raise ConfigError(f"the nkey seed {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} holds no nkey seed: expected one line that begins with SU") from error


def load_or_make(path: Path) -> KeyPair:
    """Return the key pair of the seed in `path`. Write a new seed there first if the file does not exist."""
    write_once(path, new_seed)
    return load(path)


def verify(public: str, message: bytes, signature: bytes) -> bool:
    """Return whether `signature` is a signature of `message` with the private key of `public`."""
    try:
        nacl.signing.VerifyKey(public_bytes(public)).verify(message, signature)
    except (ValueError, nacl.exceptions.CryptoError):
        return False
    return True


def public_bytes(public: str) -> bytes:
    """Return the 32 bytes of the public nkey of a user. Raises `ValueError` for anything else; its text leaves out the
    value, which may be a seed."""
    try:
        data = base64.b32decode(public + "=" * (-len(public) % 8))
    except binascii.Error:
        data = b""
    checksum = int.from_bytes(data[-2:], "little")
    if len(data) != _PUBLIC_BYTES or data[0] != nkeys.PREFIX_BYTE_USER or nkeys.crc16(data[:-2]) != checksum:
        raise ValueError("not the public nkey of a user: expected 56 characters that begin with U")
    return data[1:33]
