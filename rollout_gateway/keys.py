"""API keys of people and programs: hashed, with a role and a rate. `python -m rollout_gateway.keys` makes one.

Without any configured, everyone may call, and the gateway listens on the loopback interface only.
"""

from __future__ import annotations

import argparse
import hashlib
import ipaddress
import secrets
import sys
import time
from dataclasses import dataclass

from pipeline.config import ConfigError, GatewayConfig, KeyConfig
from rollout_gateway.errors import ApiError

PREFIX = "jm-"


@dataclass(eq=False)
class _Bucket:
    """What a key may still call: refilled at its rate, full after a minute."""

    rate: float
    """Calls per second."""
    left: float
    at: float

    def take(self, now: float) -> float:
        """0 if a call may go, else the seconds until one may."""
        self.left = min(self.rate * 60, self.left + (now - self.at) * self.rate)
        self.at = now
        if self.left >= 1:
            self.left -= 1
            return 0.0
        return (1 - self.left) / self.rate


class KeyRing:
    """Who may do what."""

    def __init__(self, config: GatewayConfig) -> None:
        if not config.keys and not _is_loopback(config.host):
            raise ConfigError(
                f"gateway.keys: without keys the gateway can't listen on {config.host}, only on 127.0.0.1"
            )
        self._keys = {key.sha256.lower(): key for key in config.keys}
        now = time.monotonic()
        self._buckets = {
            h: _Bucket(key.calls_per_minute / 60, key.calls_per_minute, now)
            for h, key in self._keys.items()
            if key.calls_per_minute
        }

    @property
    def required(self) -> bool:
        return bool(self._keys)

    def check(self, key: str, *, operator: bool = False) -> None:
        """Let the caller pass, or raise a 401, 403 or 429 `ApiError`."""
        if not self._keys:
            return
        # The lookup is by hash, so its timing says nothing of any key.
        digest = hashlib.sha256(key.encode()).hexdigest()
        found = self._keys.get(digest)
        if found is None:
            raise ApiError(
                401, "This gateway wants an API key of its own.", kind="authentication_error", code="invalid_api_key"
            )  # fmt: skip
        if operator and found.role != "operator":
            raise ApiError(403, "This takes an operator's key.", kind="permission_error", code="wrong_role")
        self._spend(found, digest)

    def _spend(self, key: KeyConfig, digest: str) -> None:
        bucket = self._buckets.get(digest)
        wait = bucket.take(time.monotonic()) if bucket is not None else 0.0
        if wait:
            raise ApiError(
                429,
                f"The key {key.name!r} may call {key.calls_per_minute} times a minute.",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                headers=((b"retry-after", str(int(wait) + 1).encode()),),
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main() -> None:
    """Make a key: the settings that know it go to standard output, the key itself to the terminal's error stream."""
    parser = argparse.ArgumentParser(prog="python -m rollout_gateway.keys", description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--role", choices=("agent", "operator"), default="agent")
    parser.add_argument("--calls-per-minute", type=int, default=0)
    args = parser.parse_args()
    key = PREFIX + secrets.token_urlsafe(32)
    sys.stderr.write(f"the key, shown this once: {key}\n")
    sys.stdout.write(
        f'[[gateway.keys]]\nname = "{args.name}"\nrole = "{args.role}"\n'
        f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\ncalls_per_minute = {args.calls_per_minute}\n'
    )


if __name__ == "__main__":
    main()
