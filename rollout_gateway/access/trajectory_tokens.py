"""API keys of single trajectories, which need not be looked up: a key is a name and its signature."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac


class Keys:
    """Per-trajectory API keys: made from a secret and the trajectory's name, so no key is ever stored, and opening
    again (a client's retry) gives the same one."""

    prefix = "jmt-"

    def __init__(self, secret: bytes, project: str) -> None:
        self._secret, self._project = secret, project

    def make(self, trajectory: str) -> str:
        mac = hmac.digest(self._secret, f"{self._project}\0{trajectory}".encode(), "sha256")
        name = base64.urlsafe_b64encode(trajectory.encode()).rstrip(b"=").decode()
        return f"{self.prefix}{name}.{base64.urlsafe_b64encode(mac[:24]).decode()}"

    @staticmethod
    def hash(key: str) -> str:
        return hashlib.sha256(key.encode()).hexdigest()

    def trajectory(self, key: str) -> str | None:
        """The id of the trajectory whose key this is, its signature checked; `None` for anything else."""
        name = key[len(self.prefix) :].partition(".")[0] if key.startswith(self.prefix) else ""
        try:
            trajectory = base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
        except (binascii.Error, ValueError):
            return None
        if not trajectory or not hmac.compare_digest(self.make(trajectory).encode(), key.encode()):
            return None
        return trajectory
