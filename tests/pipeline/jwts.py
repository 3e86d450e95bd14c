"""NATS's decentralised users made for a test: an operator, an account and a user's credentials file, as `nsc` writes
them."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import time
from pathlib import Path
from typing import Any

import nkeys


class _Key:
    def __init__(self, kind: int) -> None:
        self.seed = bytes(nkeys.encode_seed(secrets.token_bytes(32), kind))
        self._pair = nkeys.from_seed(bytearray(self.seed))
        self.public: str = self._pair.public_key.decode().rstrip("=")

    def jwt(self, subject: _Key, name: str, kind: str, claims: dict[str, Any]) -> str:
        """A token about `subject`, signed by this key."""
        body: dict[str, Any] = {
            "iat": int(time.time()), "iss": self.public, "name": name, "sub": subject.public,
            "nats": {**claims, "type": kind, "version": 2},
        }  # fmt: skip
        body["jti"] = (
            base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).decode().rstrip("=")
        )
        head = _part({"typ": "JWT", "alg": "ed25519-nkey"}) + b"." + _part(body)
        return (head + b"." + _encode(self._pair.sign(head))).decode()


def _encode(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _part(value: dict[str, Any]) -> bytes:
    return _encode(json.dumps(value).encode())


def decentralised(folder: Path) -> tuple[str, Path]:
    """Return a server's configuration and the credentials file of a user that it lets in."""
    operator, system, account, user = (
        _Key(kind)
        for kind in (
            nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_USER,
        )
    )  # fmt: skip
    limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1) | {
        "wildcards": True
    }
    storage = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
    accounts = {
        system.public: operator.jwt(system, "SYS", "account", {"limits": limits}),
        account.public: operator.jwt(account, "runs", "account", {"limits": limits | storage}),
    }
    config = (
        f"operator: {operator.jwt(operator, 'test', 'operator', {})}\nsystem_account: {system.public}\n"
        f"resolver: MEMORY\nresolver_preload: {json.dumps(accounts)}\n"
    )
    token = account.jwt(user, "judge", "user", {"subs": -1, "data": -1, "payload": -1})
    file = folder / "judge.creds"
    file.write_text(
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    return config, file
