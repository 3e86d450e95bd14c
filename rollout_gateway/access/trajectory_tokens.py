"""Trajectory tokens: API keys of single trajectories, which agents get in place of the opener's key.

A token is `jwr-<id>.<HMAC of project and id>`, so none is ever stored, and a gateway with the same secret knows it."""

from __future__ import annotations

import base64
import hmac


class TrajectoryTokens:
    """Issues and verifies the tokens of one project. The same trajectory always gets the same token."""

    prefix = "jwr-"

    def __init__(self, secret: bytes, project: str) -> None:
        """`secret`: the same for all gateways of the project; who knows it can make tokens."""
        self._secret, self._project = secret, project

    def issue(self, trajectory: str) -> str:
        """Return the token of the trajectory with this id."""
        mac = self._mac(trajectory)
        name = base64.urlsafe_b64encode(trajectory.encode()).rstrip(b"=").decode()
        return f"{self.prefix}{name}.{base64.urlsafe_b64encode(mac[:24]).decode()}"

    def group_name(self, text: str) -> str:
        """Return the name of the detected group whose runs share `text`: the same name for the same text. No client can
        predict it, as whoever opens a group first owns it."""
        return self._mac(f"group\0{text}").hex()[:20]

    def _mac(self, text: str) -> bytes:
        """Return the HMAC-SHA256 of the project and `text`."""
        return hmac.digest(self._secret, f"{self._project}\0{text}".encode(), "sha256")

    def verify(self, token: str) -> str | None:
        """Return the id of the token's trajectory, or `None` if the token was not issued with this secret and
        project."""
        name = token[len(self.prefix) :].partition(".")[0] if token.startswith(self.prefix) else ""
        try:
            trajectory = base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
        except ValueError:
            return None
        if not trajectory or not hmac.compare_digest(self.issue(trajectory).encode(), token.encode()):
            return None
        return trajectory
