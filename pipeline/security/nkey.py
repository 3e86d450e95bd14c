"""nkeys, NATS's Ed25519 keys: seeds in files that only their owner reads, signatures, and their check.

    python -m pipeline.security.nkey trainer.nk     # makes the file unless it is there, and prints the public key

A seed (`SU…`) is the secret; the public key (`U…`) names it. Both are text. No function here puts a seed into an error.

Errors: `ConfigError`, which names the file.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import contextlib
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

import nacl.exceptions
import nacl.signing
import nkeys

from pipeline.config import ConfigError

_PUBLIC_BYTES = 35
"""One byte for the key's kind, 32 of the key, two of a checksum."""


class KeyPair:
    """A seed and what can be done with it."""

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
    """Return the key pair whose seed `path` holds. Raises `ConfigError` if there is none to be read."""
    try:
        return KeyPair(Path(path).read_bytes().strip())
    except OSError as error:
        raise ConfigError(f"no nkey seed can be read from {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} holds no nkey seed, which is one line that begins with SU") from error


def load_or_make(path: Path) -> KeyPair:
    """Return the key pair of `path`; write a fresh seed there first if the file does not exist."""
    write_secret(path, new_seed)
    return load(path)


def write_secret(path: Path, make: Callable[[], bytes]) -> None:
    """Write what `make` returns to `path`, mode 0600, unless the file exists. Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(make())
        file.flush()
        os.fsync(descriptor)
    with contextlib.suppress(FileExistsError):  # another process was first: its secret holds
        os.link(temporary, path)
    temporary.unlink()


def verified(public: str, message: bytes, signature: bytes) -> bool:
    """Return whether `signature` is that of `message` by the holder of the public key `public`."""
    try:
        nacl.signing.VerifyKey(_raw(public)).verify(message, signature)
    except (ValueError, nacl.exceptions.CryptoError):
        return False
    return True


def check_public(public: str) -> str:
    """Return `public` if it is a public user nkey. Raises `ValueError` otherwise; without the value, which may be a seed."""
    _raw(public)
    return public


def _raw(public: str) -> bytes:
    try:
        data = base64.b32decode(public + "=" * (-len(public) % 8))
    except binascii.Error:
        data = b""
    checksum = int.from_bytes(data[-2:], "little")
    if len(data) != _PUBLIC_BYTES or data[0] != nkeys.PREFIX_BYTE_USER or nkeys.crc16(data[:-2]) != checksum:
        raise ValueError("not a public nkey of a user, which begins with U and has 56 characters")
    return data[1:33]


def main() -> int:
    """0; 2 if the file holds no seed."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.security.nkey")
    parser.add_argument("file", type=Path, help="where the seed lies, or is to lie")
    try:
        pair = load_or_make(parser.parse_args().file)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{pair.public}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
