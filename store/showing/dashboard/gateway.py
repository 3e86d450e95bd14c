"""Calls to the gateway's API in the name of the dashboard's user."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from pipeline.config import Config
from pipeline.running.state import read_state
from store.showing.dashboard.errors import PageError

_TIMEOUT_S = 60.0
"""Time for a decision: the gateway loads the version first."""
_READ_S = 2.0
ACTIONS = ("promote", "pin", "rollback", "split", "follow")
"""Decisions about the version that a model's name stands for."""


class Gateway:
    """The gateway of a run, if it is running."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._client = httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def url(self) -> str:
        """The gateway's URL by the settings, else as `journeywork up` wrote it for the run; empty where it does not
        run."""
        if self._config.ui.gateway_url:
            return self._config.ui.gateway_url.rstrip("/")
        state = read_state(Path(self._config.run_dir))
        return state.url("gateway").rstrip("/") if state is not None and "gateway" in state.services else ""

    async def policies(self, key: str) -> list[dict[str, Any]] | None:
        """What the models' names stand for; `None` where the gateway does not answer."""
        try:
            return list((await self._request("GET", "/v1/policies", key, timeout_s=_READ_S))["data"])
        except PageError as error:
            if error.status == 503:
                return None
            raise

    async def decide(self, key: str, model: str, action: str, body: dict[str, Any]) -> dict[str, Any]:
        """Change what a model's name stands for. Raises `PageError` with the gateway's status and message."""
        return await self._request("POST", f"/v1/policies/{quote(model, safe='')}/{action}", key, body)

    async def label(self, key: str, group: str, body: dict[str, Any]) -> dict[str, Any]:
        """Record a person's scores of a group's members. Raises `PageError`."""
        return await self._request("POST", f"/v1/groups/{quote(group, safe='')}/label", key, body)

    async def _request(
        self,
        method: str,
        path: str,
        key: str,
        body: dict[str, Any] | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> dict[str, Any]:
        if not (url := self.url()):
            raise PageError(503, "This run has no gateway: start it with `journeywork up`.")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            answer = await self._client.request(
                method, url + path, json=body, headers=headers, timeout=timeout_s
            )
            found = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise PageError(
                503, f"The gateway at {url} does not answer: is `journeywork up` running?"
            ) from error
        if answer.is_error:
            message = found.get("error", {}).get("message") if isinstance(found, dict) else None
            raise PageError(answer.status_code, message or f"The gateway answered {answer.status_code}.")
        return dict(found)
